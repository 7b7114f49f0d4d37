"""Greedy search, beam search and sampling for any model that provides a step function
and a cache.

A `Step` takes the cache, the newest token of every row (N,) int32, and the position of
this token, a scalar int32. The position is also the number of tokens already in the
cache. The step returns the logits of the next token (N, V) float32, and the cache with
the newest token added. A cache is any pytree whose leaves have the rows as their first
axis.

Greedy search has N = B rows. Beam search and sampling have N = B·K rows; the K beams or
samples of a batch row are adjacent. `step` may close over values that these K rows
share. Leaving such values out of the cache makes reordering it cheaper. A cache may
also repeat and reorder its rows itself, as `models.caches.Cache` does, whose rows share
the encoded source: see `decoding.caches`.

Shapes: B batch · K beams or samples · V vocabulary · T = `max_length`, the largest
number of tokens in an output, including EOS but not BOS.

PAD and BOS are never chosen, unless EOS has the same id. `pad_id` is None if the
vocabulary has no PAD. The probabilities of PAD and BOS are not redistributed to other
tokens. Call these functions under `jit`; keyword arguments other than arrays are
static.
"""

from transformer_jax.decoding.beam import (
    LENGTH_PENALTY_FORMS,
    STOPPING_RULES,
    beam_search,
    lp,
)
from transformer_jax.decoding.distributions import (
    LEAST_TEMPERATURE,
    penalize,
    truncate,
)
from transformer_jax.decoding.generation import Writer
from transformer_jax.decoding.loop import Continuations, greedy, sample
from transformer_jax.decoding.options import (
    DecodingConfig,
    GenerationConfig,
    SamplingConfig,
)
from transformer_jax.decoding.search import beams, copies, search
from transformer_jax.decoding.steps import (
    IMPOSSIBLE,
    Cache,
    Hypotheses,
    Step,
    certain,
    is_end,
)

__all__ = [
    "IMPOSSIBLE",
    "LEAST_TEMPERATURE",
    "LENGTH_PENALTY_FORMS",
    "STOPPING_RULES",
    "Cache",
    "Continuations",
    "DecodingConfig",
    "GenerationConfig",
    "Hypotheses",
    "SamplingConfig",
    "Step",
    "Writer",
    "beam_search",
    "beams",
    "certain",
    "copies",
    "greedy",
    "is_end",
    "lp",
    "penalize",
    "sample",
    "search",
    "truncate",
]
