"""Calls of an encoder–decoder in one `apply`: reading a given target, and the beginning
of a search.
"""

import jax

from transformer_jax.models.caches import Cache, repeat_rows
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.layers import Head


def teacher_forced(
    model: EncoderDecoder,
    source: jax.Array,
    source_valid: jax.Array,
    read: jax.Array,
    target_valid: jax.Array | None = None,
    step: jax.Array | int = 0,
) -> tuple[jax.Array, Head]:
    """Return the decoder's output (B, T, D) if it reads ids (B, T), and the head that
    maps it to logits.

    The source may have fewer rows, B / R. Then R adjacent rows of ids share one.

    Pass it to `model.apply` as the method.
    """
    memory = model.encode(source, source_valid)
    if read.shape[0] > source.shape[0]:
        memory = repeat_rows(memory, read.shape[0] // source.shape[0])
    return model.hidden(memory, read, target_valid, step), model.head()


def start(
    model: EncoderDecoder,
    source: jax.Array,
    source_valid: jax.Array,
    room: int,
    hypotheses: int = 1,
) -> Cache:
    """Encode the source and return `EncoderDecoder.start` of its memory.

    Pass it to `model.apply` as the method.
    """
    return model.start(model.encode(source, source_valid), room, hypotheses)
