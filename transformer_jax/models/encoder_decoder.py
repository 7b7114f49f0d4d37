"""The interface of encoder–decoders.

Training, decoding and reports use a model only through it, so a model that has these
methods works with all of them.

Shapes: B batch · S source positions · T target positions · J hypotheses of a row · D
width of the decoder's output · N heads · L layers · V vocabulary.
"""

from typing import Any, Protocol

import jax

from transformer_jax.models.caches import Cache
from transformer_jax.models.layers import Head

Array = jax.Array


class EncoderDecoder(Protocol):
    """A Flax module that maps a source to a distribution over target sequences.

    `Transformer`, `RecurrentSeq2Seq` and `ConvS2S` are examples. Call methods with
    `model.apply`, e.g. `model.apply(variables, source, valid,
    method=Transformer.encode)`. A function that takes the model as its first argument
    can call several of them at once:

        def logits(model, source, valid, target):
            memory = model.encode(source, valid)
            return model.head()(model.hidden(memory, target))

        model.apply(variables, source, valid, target, method=logits)

    Dropout is active only if `apply` is given a "dropout" key.
    """

    def encode(self, inputs: Array, valid: Array | None = None) -> Any:
        """Encode the source → its memory, which knows what in it is padding.

        `inputs` are what the front end of the model reads, e.g. ids (B, S). `valid` (B,
        S) is True at the source and False at padding. None: there is no padding.
        """

    def hidden(
        self,
        memory: Any,
        target: Array,
        target_valid: Array | None = None,
        step: Array | int = 0,
    ) -> Array:
        """Return the decoder's output (B, T, D) if it reads the ids `target` (B, T).

        `head` maps it to the logits of the token that follows each position.
        `target_valid` (B, T) is True at tokens and False at padding. `step` is the
        number of the update, from 0, for models that change in the course of training;
        others ignore it.
        """

    def head(self) -> Head:
        """Return the map from the decoder's output to logits."""

    def start(
        self,
        memory: Any,
        room: int,
        hypotheses: int = 1,
    ) -> Cache:
        """Return a cache of B · J sequences that have no token yet.

        `room` is the largest number of tokens that `extend` will read; models whose
        caches do not grow ignore it. `hypotheses` is J, the number of sequences of each
        row among which a search chooses with `Cache.reorder`. They are adjacent.

        Raises:
            ValueError: The model has fewer than `room` positions.
        """

    def extend(
        self,
        cache: Cache,
        ids: Array,
        position: Array | int,
    ) -> tuple[Array, Cache]:
        """Read ids (B · J, T) → logits (B · J, T, padded V), the cache with them.

        `position` is that of the first of them, i.e. the number of tokens in the cache.
        There is no dropout. T may be above 1 if J is 1.
        """

    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, L, N, T, S) from `sown`.

        `sown` is the collection "intermediates" that `hidden` and `encode` have filled.
        The key is (name, sequence of the queries, sequence of the keys). The sequences
        are "source", "target" (the tokens to predict) and "input" (the tokens that the
        decoder reads).
        """
