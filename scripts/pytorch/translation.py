r"""Time beam search beside CTranslate2, with the same weights.

    python scripts/pytorch/translation.py --config=configs/wmt14.py:base

The weights are random. Both sides translate the same random sentences of `--length`
tokens into `--tokens` tokens, and take turns on one device. One JSON line holds the
tokens per second of each side and their ratio (2 means that we are twice as fast), and
how many sentences have the same translation.

The recipe's model gets what Marian's models have, because CTranslate2 reads them: see
MARIAN. The output layer makes the end token impossible, so that all translations have
one length and neither side needs a rule for it.

Needs CTranslate2, transformers, PyTorch and sentencepiece. On a GPU, CTranslate2 looks
for libcublas.so.12; if it is missing, install nvidia-cublas-cu12 and add the folder of
this file to LD_LIBRARY_PATH.
"""

import functools
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import traverse_util
from ml_collections import ConfigDict
from turns import compare

from transformer_jax import command_line, decoding
from transformer_jax.config import parse, shrink
from transformer_jax.data import sentencepiece
from transformer_jax.decoding.options import DecodingConfig
from transformer_jax.errors import UserError
from transformer_jax.interop import huggingface
from transformer_jax.models.stack import unstack_layers
from transformer_jax.models.transformer import Transformer
from transformer_jax.tasks.teacher_forcing import start

CONFIG = command_line.define_recipe()
SENTENCES = flags.DEFINE_integer("sentences", 32, "number of sentences", lower_bound=1)
LENGTH = flags.DEFINE_integer("length", 32, "tokens of a sentence", lower_bound=2)
TOKENS = flags.DEFINE_integer("tokens", 32, "tokens of a translation", lower_bound=1)
BEAM = flags.DEFINE_integer("beam", 4, "beam size; 1: greedy search", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 5, "how often each side has its turn")
COMPUTE_TYPE = flags.DEFINE_string(
    "compute_type",
    None,
    "compute type of CTranslate2, e.g. float16 or int8_float16; by default that of the "
    "model on a GPU, and float32 on a CPU",
)
SMALL = flags.DEFINE_bool("small", False, "shrink the model, to try the command")

# Keys of config.model with which transformers and CTranslate2 have the same model.
MARIAN = {"positions": "sinusoidal_halves", "norm_epsilon": 1e-5, "output_bias": True}
# Ids of Marian's vocabularies. The last id is that of padding, and begins translations.
END = 0
FIRST = 2  # the first id of a word; 1 is an unknown word

PACKAGES = ("ctranslate2", "transformers", "torch", "sentencepiece")

Translate = Callable[[], Any]


def packages() -> list[ModuleType]:
    """Import PACKAGES.

    Raises UserError if one of them is not installed.
    """
    try:
        return [importlib.import_module(name) for name in PACKAGES]
    except ImportError as error:
        raise UserError(
            f"the comparison needs {', '.join(PACKAGES)} ({error}): "
            "pip install ctranslate2 'transformer_jax[huggingface]'"
        ) from error


def check_model(model: ConfigDict) -> None:
    """Raise UserError if this is no encoder–decoder Transformer with one vocabulary."""
    if model.get("architecture") != "transformer":
        raise UserError(
            f"model.architecture = {model.get('architecture')!r}: must be 'transformer'"
            "; choose such a recipe, e.g. configs/wmt14.py:base"
        )
    source = model.source_vocab_size
    target = model.target_vocab_size
    if source != target:
        raise UserError(
            f"model.source_vocab_size = {source}, model.target_vocab_size = {target}: "
            f"must be equal; add --config.model.target_vocab_size={source}"
        )


def check_lengths(longest: int) -> None:
    """Raise UserError if the model has fewer positions than the sentences need."""
    for name, value in (("length", LENGTH.value), ("tokens", TOKENS.value)):
        if value > longest:
            raise UserError(
                f"--{name}={value}: must be at most model.max_length = {longest}"
            )


def random_params(c: Any) -> dict[str, Any]:
    """Return random parameters.

    The end token is impossible. The embedding that begins a translation is zero, as
    CTranslate2 assumes.
    """
    ids = jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(Transformer(c).init(jax.random.key(0), ids, ids))["params"]
    flat = traverse_util.flatten_dict(params, sep="/")
    bias = "output/bias" if c.has_output_layer else "output_bias"
    flat[bias] = flat[bias].at[END].set(-1e4)
    table = flat["target_embedding/table"]
    flat["target_embedding/table"] = table.at[c.target_vocab_size - 1].set(0.0)
    return traverse_util.unflatten_dict(flat, sep="/")


def here(c: Any, params: Any, source: np.ndarray) -> Translate:
    """Return a function that returns the best translations (B, T)."""
    rows = source.shape[0]
    model = Transformer(c)
    options = DecodingConfig(beam_size=BEAM.value)
    begin = c.target_vocab_size - 1

    @jax.jit
    def search(params, source):
        cache = model.apply(
            {"params": params},
            source,
            jnp.ones(source.shape, bool),
            TOKENS.value,
            BEAM.value,
            method=start,
        )
        variables = {"params": unstack_layers(params)}
        extend = functools.partial(model.apply, variables, method=model.extend)

        def step(cache, token, position):
            logits, cache = extend(cache, token[:, None], position)
            return logits[:, 0], cache

        hypotheses = decoding.search(
            step,
            cache,
            options,
            only_greedy=False,
            row_ids=jnp.arange(rows),
            vocab_size=c.target_vocab_size,
            batch_size=rows,
            max_length=TOKENS.value,
            bos_id=begin,
            eos_id=END,
            pad_id=begin,
        )
        return hypotheses.tokens[:, 0]

    return lambda: np.asarray(search(params, source))


def words(size: int) -> list[str]:
    """Return a vocabulary of Marian. The word with id i is "i"."""
    return ["</s>", "<unk>", *map(str, range(FIRST, size - 1)), "<pad>"]


def write_marian(folder: Path, c: Any, params: Any) -> None:
    """Write the model and a tokenizer as a folder of transformers."""
    vocabulary = {word: i for i, word in enumerate(words(c.source_vocab_size))}
    scores = {word: -1.0 for word, i in vocabulary.items() if word == str(i)}
    pieces = sentencepiece.Pieces(scores, character_map=b"")
    tokenizer = sentencepiece.tokenizer(pieces, vocabulary)
    files = sentencepiece.contents(tokenizer, tokenizer, c.max_length)
    begin = vocabulary["<pad>"]
    huggingface.write(
        folder,
        "sequence_to_sequence",
        c,
        params,
        settings={},
        name="MarianMTModel",
        special_ids={"bos_id": begin, "eos_id": END, "pad_id": begin},
        beside=lambda architecture: files,
    )


def device_of(ctranslate2: ModuleType) -> str:
    """Return the device of CTranslate2, which is that of JAX.

    Raises UserError if CTranslate2 cannot use it.
    """
    if jax.default_backend() == "cpu":
        return "cpu"
    if ctranslate2.get_cuda_device_count() == 0:
        raise UserError(
            f"JAX uses {jax.devices()[0].device_kind}, but CTranslate2 finds no GPU: "
            "set JAX_PLATFORMS=cpu to compare them on the CPU"
        )
    return "cuda"


def compute_type_of(ctranslate2: ModuleType, device: str, dtype: str) -> str:
    """Return the compute type of CTranslate2 for a model of this `dtype`.

    Raises UserError if the device does not support it.
    """
    compute_type = COMPUTE_TYPE.value or (dtype if device == "cuda" else "float32")
    supported = ctranslate2.get_supported_compute_types(device)
    if compute_type not in supported:
        raise UserError(
            f"--compute_type={compute_type}: CTranslate2 does not have it on this "
            f"{device}; choose from {', '.join(sorted(supported))}"
        )
    return compute_type


def load_translator(ctranslate2: ModuleType, c: Any, params: Any) -> Any:
    """Convert the model and return a Translator of CTranslate2."""
    device = device_of(ctranslate2)
    compute_type = compute_type_of(ctranslate2, device, c.dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_marian(folder / "marian", c, params)
        converters = ctranslate2.converters
        converter = converters.TransformersConverter(str(folder / "marian"))
        converter.convert(str(folder / "converted"))
        return ctranslate2.Translator(
            str(folder / "converted"),
            device=device,
            compute_type=compute_type,
            intra_threads=len(os.sched_getaffinity(0)),
        )


def there(translator: Any, source: np.ndarray) -> Translate:
    """Return a function that returns what CTranslate2 makes of the sentences."""
    sentences = [[str(i) for i in row] for row in source]
    return lambda: translator.translate_batch(
        sentences,
        beam_size=BEAM.value,
        max_input_length=0,  # no limit
        max_decoding_length=TOKENS.value,
    )


def seconds_of(translate: Translate) -> float:
    begun = time.perf_counter()
    translate()
    return time.perf_counter() - begun


def count_same(ours: np.ndarray, theirs: list[Any], vocabulary: list[str]) -> int:
    """Return the number of sentences that both sides translate in the same way.

    Raises RuntimeError if a translation of CTranslate2 does not have `--tokens` tokens.
    """
    hypotheses = [result.hypotheses[0] for result in theirs]
    lengths = {len(hypothesis) for hypothesis in hypotheses}
    if lengths != {TOKENS.value}:
        raise RuntimeError(
            f"CTranslate2 wrote {sorted(lengths)} tokens instead of {TOKENS.value}"
        )
    return sum(
        [vocabulary[i] for i in row] == hypothesis
        for row, hypothesis in zip(ours, hypotheses, strict=True)
    )


def main() -> None:
    raw = CONFIG.value
    raw.data.directory = raw.data.directory or "(none)"
    check_model(raw.model)
    if SMALL.value:
        shrink(raw)
        raw.model.num_heads = raw.model.d_model // raw.model.head_dim
    raw.model.update(MARIAN)
    c = parse(raw).model
    check_lengths(c.max_length)
    ctranslate2, transformers, *_ = packages()
    params = random_params(c)
    source = np.random.default_rng(0).integers(
        FIRST,
        c.source_vocab_size - 1,
        size=(SENTENCES.value, LENGTH.value),
        dtype=np.int32,
    )
    translator = load_translator(ctranslate2, c, params)
    ours = here(c, params, source)
    theirs = there(translator, source)
    first = seconds_of(ours)
    first_there = seconds_of(theirs)
    same = count_same(ours(), theirs(), words(c.target_vocab_size))
    seconds, seconds_there, ratio = compare(
        functools.partial(seconds_of, ours),
        functools.partial(seconds_of, theirs),
        ROUNDS.value,
    )
    total = SENTENCES.value * TOKENS.value
    line = {
        "sentences": SENTENCES.value,
        "length": LENGTH.value,
        "tokens": TOKENS.value,
        "beam": BEAM.value,
        "here_tokens_per_s": round(total / seconds, 1),
        "ctranslate2_tokens_per_s": round(total / seconds_there, 1),
        **ratio,
        "same": same,
        "here_first_s": round(first, 1),
        "ctranslate2_first_s": round(first_there, 1),
        "dtype": c.dtype,
        "ctranslate2_dtype": translator.compute_type,
        "ctranslate2": ctranslate2.__version__,
        "transformers": transformers.__version__,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    command_line.run(main)
