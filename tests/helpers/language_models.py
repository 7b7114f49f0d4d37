"""Language models of transformers beside ours: a batch, hidden states, and greedy
continuations.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.generation import Writer
from transformer_jax.decoding.options import GenerationConfig
from transformer_jax.models.gpt import GPTConfig
from transformer_jax.models.masks import CAUSAL, padding

B, T, V, L, NEW = 3, 13, 97, 2, 11
TOKENS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
LENGTHS = np.array([T, 7, 5])
PADDED = GPTConfig(vocab_multiple=8)
VALID = np.arange(T)[None] < LENGTHS[:, None]


def run(torch, theirs, **more):
    """Return what their model computes for the batch."""
    tokens, valid = (torch.tensor(array.astype(np.int64)) for array in (TOKENS, VALID))
    return theirs(
        input_ids=tokens, attention_mask=valid, output_hidden_states=True, **more
    )


def states(module):
    """Return the L + 1 hidden states (B, T, D)."""
    x = module.embedding(TOKENS) + module.positions(T, 0)
    return [
        x,
        *jnp.moveaxis(
            module.decoder.outputs(x, CAUSAL & padding(jnp.asarray(VALID))), 1, 0
        ),
    ]


def continued(found, eos, **options):
    """Return our greedy continuations of the rows of the batch, up to the end id
    `eos`.
    """
    module, params = found.module, {"params": found.params()}
    extend = functools.partial(module.apply, params, method=module.extend)
    writer = Writer(
        extend,
        GenerationConfig(max_extra=NEW, **options),
        True,
        V,
        bos_id=eos,
        eos_id=eos,
        pad_id=None,
    )

    @jax.jit
    def write(tokens, lengths):
        cache = module.apply(params, B, T + NEW, method=module.start)
        written = writer.begin(cache, tokens, lengths)
        return writer.proceed(written, T, lengths, jnp.arange(B), NEW).tokens

    return np.asarray(write(TOKENS, LENGTHS))


def generated(torch, theirs, row, eos, **options):
    """Return their continuation of a row. After the end come end ids, as in ours."""
    prompt = torch.tensor(TOKENS[row : row + 1, : LENGTHS[row]].astype(np.int64))
    fixed = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": eos}
    tokens = theirs.generate(prompt, **fixed, **{"eos_token_id": eos} | options)
    found = tokens[0, LENGTHS[row] :].numpy()
    return np.pad(found, (0, NEW - len(found)), constant_values=eos)
