"""Recurrent encoder–decoders, with and without attention.

`RecurrentConfig.attention` selects the model: Sutskever et al. 2014 or Cho et al. 2014
("none"), Bahdanau et al. 2015 ("additive"), Luong et al. 2015 ("concat", "dot",
"general"), or Luong's decoder with the queries, keys and values of Vaswani et al. 2017
("scaled_dot", "multi_head"). This module has the whole. The encoders are in
`recurrent_encoders`, the steps of the decoders in `decoders`, the score functions in
`alignment`.

Shapes: B batch · S source positions · T target positions · E embedding · C encoder's
output · D decoder's state (d_model) · N heads · V vocabulary.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.attention import Valid
from transformer_jax.models.caches import Cache, repeat_rows
from transformer_jax.models.checks import check_ids, check_valid
from transformer_jax.models.decoders import DECODERS, State
from transformer_jax.models.front_ends import Tokens
from transformer_jax.models.layers import Dropout, Embedding, Head, OutputLayer
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.recurrent_encoders import Annotations, Encoded, Encoder

Array = jax.Array


class Reading(NamedTuple):
    """The words that the decoder reads in scheduled sampling (Bengio et al. 2015).

    The word at a position is that of the reference or the decoder's own: the most
    probable word after the previous position. Both fields are bool, (T,).

    reference: True where the decoder reads the word of the reference.
    own_is_next: True where it reads its own word at the next position.
    """

    reference: Array
    own_is_next: Array


class RecurrentSeq2Seq(nn.Module):
    """A recurrent encoder–decoder.

    `model.apply(params, source, target)` returns logits, as for `Transformer`. The
    other methods are those of `EncoderDecoder`.

    front_end: maps the source to vectors (B, S, E), which the encoder reads, see
        `front_ends`; without an encoder, to (B, S, C). None: the source consists of
        tokens.

    Differs:

    - For the cells, see `cells`.
    - Word vectors are multiplied by √E, as in the Transformer.
    - The summary is the encoder's last state. Cho et al. use tanh(V h), and tanh(V' c)
      as the decoder's first state.
    - The deep output of Bahdanau et al. reads s_t, as in their equation 4; their
      appendix has s_{t-1}. The default readout is one linear map of [s_t; c_t; y].

    The encoder of Luong et al. is unidirectional, and its last states are the decoder's
    first; the same holds here unless `bidirectional` is set.
    """

    config: RecurrentConfig
    front_end: nn.Module | None = None

    def setup(self) -> None:
        c = self.config
        c.check()
        self.source_embedding = Embedding(
            c.source_vocab_size, c.embedding_dim, c.vocab_multiple
        )
        self.target_embedding = Embedding(
            c.target_vocab_size, c.embedding_dim, c.vocab_multiple
        )
        self.source = self.front_end or Tokens(self.source_embedding)
        self.encoder = Annotations(c) if c.encoder == "none" else Encoder(c)
        self.decoder = DECODERS[c.decoder](c)
        self.output = OutputLayer(
            c.target_vocab_size,
            c.output_dim,
            c.vocab_multiple,
            use_bias=True,
            dtype=c.dtype,
        )
        self.dropout = Dropout(c.dropout_rate)

    def __call__(
        self,
        source: Array,
        target: Array,
        source_valid: Valid = None,
        target_valid: Valid = None,
    ) -> Array:
        """Map source ids (B, S) and target ids (B, T) to logits of the next token.

        The logits are float32 (B, T, padded V). `source_valid` (B, S) is True at tokens
        and False at the padding that follows them, or None if there is no padding. For
        `target_valid` see `hidden`.
        """
        memory = self.encode(source, source_valid)
        return self.head()(self.hidden(memory, target, target_valid))

    def encode(self, inputs: Array, valid: Valid = None) -> Encoded:
        """Encode the source, e.g. ids (B, S), of which `valid` (B, S) are tokens.

        Padding must follow the tokens.
        """
        x, valid = self.source(inputs, valid)
        if valid is None:
            valid = jnp.ones(x.shape[:2], bool)
        check_valid("source_valid", valid, at_end=True)
        return self.encoder(x, valid)

    def hidden(
        self,
        memory: Encoded,
        target: Array,
        target_valid: Valid = None,
        step: Array | int = 0,
    ) -> Array:
        """Return the decoder's output (B, T, output_dim) if it reads `target` (B, T).

        `target_valid` is ignored, because a state depends only on earlier positions.
        The attention weights (B, N, T, S) are sown as "weights" in the collection
        "intermediates".

        If the config sets teacher forcing below 1, some positions read the most
        probable word after the previous position, instead of the word in `target`
        (Bengio et al. 2015). This happens only in training, i.e. with a "dropout" key.
        `step` is the number of the update, from 0; the share of such positions depends
        on it.

        Differs: The choice is drawn once per position for the whole batch, so that the
        product with the vocabulary can be skipped where no row needs it. Bengio et al.
        draw it for each word. Unlike in decoding, the most probable word may be padding
        or the begin-of-sentence id.
        """
        reading = None
        if self.has_rng("dropout") and self.config.reads_itself:
            rate = self.config.teacher_forcing_at(step)
            key = self.make_rng("dropout")
            reference = jax.random.bernoulli(key, rate, target.shape[1:])
            reference = reference.at[0].set(True)
            reading = Reading(reference, jnp.append(~reference[1:], False))
        cache = self.start(memory, target.shape[1])
        _, outputs, weights = self._read(cache, target, reading)
        self.sow("intermediates", "weights", weights)
        return self.dropout(outputs)

    def head(self) -> Head:
        """Return the map from the decoder's output to logits."""
        return self.output.head()

    def start(
        self,
        memory: Encoded,
        room: int,
        hypotheses: int = 1,
    ) -> Cache:
        """Return a cache with the decoder's first state.

        States do not grow, so `room` is ignored.
        """
        state = self.decoder.first(memory.carries)
        if hypotheses > 1:
            state = repeat_rows(state, hypotheses)
        shared = self.decoder.project(memory.outputs, memory.summary, memory.valid)
        return Cache(state, shared)

    def extend(
        self,
        cache: Cache,
        ids: Array,
        position: Array | int,
    ) -> tuple[Array, Cache]:
        """Read ids (B, T) → logits (B, T, padded V), the cache with them.

        A state knows what came before it, so `position` is ignored.
        """
        state, outputs, _ = self._read(cache, ids)
        return self.head()(outputs), cache._replace(past=state)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, 1, N, T, S), or no map without attention."""
        if self.config.attention == "none":
            return {}
        return {("alignment", "target", "source"): sown["weights"][0][:, None]}

    def _read(
        self,
        cache: Cache,
        target: Array,
        reading: Reading | None = None,
    ) -> tuple[State, Array, Array]:
        """Read target ids (B, T) → the last state, outputs, weights (B, N, T, S).

        The outputs are (B, T, output_dim). Without `reading`, the decoder reads the
        target at all positions.
        """
        check_ids("target", target, self.config.target_vocab_size)
        head = self.head()

        def word(model: RecurrentSeq2Seq, ids: Array) -> Array:
            return model.dropout(model.target_embedding(ids))

        def most_probable(output: Array) -> Array:
            logits = head(output[:, None])[:, 0]
            return logits.argmax(axis=-1).astype(target.dtype)

        def step(
            model: RecurrentSeq2Seq,
            before: tuple[State, Array],
            inputs: tuple[Array, Reading | None],
        ) -> tuple[tuple[State, Array], tuple[Array, Array]]:
            state, predicted = before
            y, reading = inputs
            if reading is not None:
                own = word(model, predicted[:, None])[:, 0]
                y = jnp.where(reading.reference, y, own)
            state, output, weights = model.decoder(state, y, cache.memory)
            # Compute the most probable word only if the next step reads it.
            if reading is not None:
                predicted = jax.lax.cond(
                    reading.own_is_next,
                    most_probable,
                    lambda output: predicted,
                    jax.lax.stop_gradient(output),
                )
            return (state, predicted), (output, weights)

        scan = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=((1, 0),),
            out_axes=(1, 2),
        )
        before = (cache.past, target[:, 0])
        words = word(self, target)
        after, (outputs, weights) = scan(self, before, (words, reading))
        state, _ = after
        return state, outputs, weights
