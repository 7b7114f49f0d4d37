r"""Time greedy generation beside `generate` of Hugging Face's GPT-2.

    python scripts/pytorch/generation.py --config=configs/gpt.py:gpt2-small

Both sides have random weights of the recipe's sizes, prompts of one length, and write
the same number of tokens. They take turns on one device. One JSON line holds the tokens
per second of each side and their ratio (2 means that we are twice as fast).

`--static` gives Hugging Face a static cache, which it uses with `torch.compile`. Needs
transformers and PyTorch.
"""

import functools
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl import flags
from turns import compare

from transformer_jax import command_line
from transformer_jax.config import parse, shrink
from transformer_jax.decoding.generation import Writer
from transformer_jax.decoding.options import GenerationConfig
from transformer_jax.models.gpt import GPT
from transformer_jax.models.stack import unstack_layers

CONFIG = command_line.define_recipe()
PROMPTS = flags.DEFINE_integer("prompts", 32, "number of prompts", lower_bound=1)
LENGTH = flags.DEFINE_integer("length", 32, "tokens of a prompt", lower_bound=2)
TOKENS = flags.DEFINE_integer("tokens", 96, "tokens to write", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 5, "how often each side has its turn")
STATIC = flags.DEFINE_bool("static", False, "static cache and torch.compile")
SMALL = flags.DEFINE_bool("small", False, "shrink the model, to try the command")

Turn = Callable[[], float]


def here(c, prompts: np.ndarray) -> Turn:
    """Return a function that continues the prompts, and returns the seconds."""
    rows, length = prompts.shape
    model = GPT(c)
    params = nn.unbox(model.init(jax.random.key(0), jnp.asarray(prompts)))["params"]
    options = GenerationConfig(max_extra=TOKENS.value)

    @jax.jit
    def generate(params, prompts):
        variables = {"params": unstack_layers(params)}
        extend = functools.partial(model.apply, variables, method=model.extend)
        writer = Writer(extend, options, True, c.vocab_size, None, None, None)
        room = length + TOKENS.value
        cache = model.apply({"params": params}, rows, room, method=model.start)
        lengths = jnp.full(rows, length)
        written = writer.begin(cache, prompts, lengths)
        ids = jnp.arange(rows)
        return writer.proceed(written, length, lengths, ids, TOKENS.value).tokens

    def turn() -> float:
        start = time.perf_counter()
        tokens = np.asarray(generate(params, prompts))
        assert tokens.shape == (rows, TOKENS.value)
        return time.perf_counter() - start

    return turn


def hugging_face(c, prompts: np.ndarray, device: str) -> Turn:
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.max_length,
        n_embd=c.d_model,
        n_layer=c.num_layers,
        n_head=c.num_heads,
        n_inner=c.d_ff,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).to(device).eval()
    model = model.to(getattr(torch, c.dtype))
    ids = torch.from_numpy(prompts).to(device, torch.int64)
    options = {"cache_implementation": "static"} if STATIC.value else {}

    def turn() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=TOKENS.value,
                max_new_tokens=TOKENS.value,
                **options,
            )
        assert written.cpu().shape[1] == prompts.shape[1] + TOKENS.value
        return time.perf_counter() - start

    return turn


def main() -> None:
    raw = CONFIG.value
    raw.data.directory = raw.data.directory or "(none)"
    if SMALL.value:
        shrink(raw)
    config = parse(raw)
    c = config.model
    command_line.check_length(LENGTH.value + TOKENS.value, *config.longest)
    prompts = np.random.default_rng(0).integers(
        c.vocab_size, size=(PROMPTS.value, LENGTH.value), dtype=np.int32
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = here(c, prompts)
    theirs = hugging_face(c, prompts, device)
    first = ours()
    first_there = theirs()
    seconds, seconds_there, ratio = compare(ours, theirs, ROUNDS.value)
    total = PROMPTS.value * TOKENS.value
    line = {
        "prompts": PROMPTS.value,
        "tokens": TOKENS.value,
        "here_tokens_per_s": round(total / seconds, 1),
        "hf_tokens_per_s": round(total / seconds_there, 1),
        **ratio,
        "here_first_s": round(first, 1),
        "hf_first_s": round(first_there, 1),
        "static": STATIC.value,
        "dtype": c.dtype,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    command_line.run(main)
