"""Recurrent encoder–decoders, with and without attention.

`RecurrentConfig.attention` selects the model: Sutskever et al. 2014 or Cho et al. 2014
("none"), Bahdanau et al. 2015 ("additive"), Luong et al. 2015 ("concat", "dot",
"general"), or Luong's decoder with the queries, keys and values of Vaswani et al. 2017
("scaled_dot", "multi_head"). The score functions are in `alignment`.

Shapes: B batch · S source positions · T target positions · E embedding · C encoder's
output · D decoder's state (d_model) · N heads · V vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export

from transformer_jax import fields
from transformer_jax.errors import UserError
from transformer_jax.models import layers
from transformer_jax.models.alignment import ALIGNMENTS, Memory
from transformer_jax.models.attention import Valid
from transformer_jax.models.checks import check_ids, check_valid
from transformer_jax.models.layers import (
    Dropout,
    Embedding,
    Linear,
    LMHead,
    OutputLayer,
    named,
)

Array = jax.Array
Carry = Any  # the carry of a cell: h (B, D), or (c, h) for an LSTM

CELLS: dict[str, Any] = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}
SUMMARIES = ("initial", "every_step")
READOUTS = ("linear", "maxout")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Config of `RecurrentSeq2Seq`.

    `attention` selects the model; the other fields are options of the papers.
    """

    architecture: str = dataclasses.field(default="recurrent", kw_only=True)
    source_vocab_size: int = fields.size(10_000, 304)
    target_vocab_size: int = fields.size(10_000, 304)
    cell: str = "gru"
    num_layers: int = 1
    embedding_dim: int = fields.size(256, 8)  # E
    # C: output at each position, both directions together
    encoder_dim: int = fields.size(512, 32, like="d_model")
    d_model: int = fields.size(512, 16)  # D: the decoder's state
    bidirectional: bool = False
    # a unidirectional encoder reads the source backwards (Sutskever et al. 2014)
    reverse_source: bool = False
    attention: str = "none"
    # How the decoder uses the encoder's last state without attention. "initial": as its
    # first state (Sutskever et al. 2014). "every_step": also as an input to every step
    # and to the readout (Cho et al. 2014).
    summary: str = "initial"
    # hidden units of "additive" and "concat" attention
    attention_dim: int = fields.size(512, 8)
    num_heads: int = fields.size(8, 8)  # of "multi_head" attention
    # each step's output is an input to the next step (Luong et al. 2015, Section 3.3)
    input_feeding: bool = False
    # D of Luong et al.'s local-p attention; 0 for global attention
    local_window: int = 0
    damping: bool = False  # see `alignment.damped_scores`
    # How additive attention and summary = "every_step" combine state, context and
    # previous word before the output layer. "linear": concatenated. "maxout": a maxout
    # layer (Goodfellow et al. 2013).
    readout: str = "linear"
    readout_dim: int = fields.size(500, 8)  # of "maxout"
    # The share of training steps in which the decoder reads the reference word, not the
    # word it predicted. The share changes linearly from teacher_forcing to
    # teacher_forcing_end over teacher_forcing_steps updates (Bengio et al. 2015,
    # Section 2.4). With 0 updates it stays at teacher_forcing.
    teacher_forcing: float = fields.random(1.0, 1.0)
    teacher_forcing_end: float = fields.random(1.0, 1.0)
    teacher_forcing_steps: int = fields.random(0, 0)
    dropout_rate: float = fields.random(0.5, 0.0)
    max_length: int = fields.size(1024, 32)
    vocab_multiple: int = 1
    dtype: str = fields.how("float32")  # of the products outside the cells

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in ("local_window", "teacher_forcing_steps") else 1
            if type(value) is int and value < least:
                yield name, f"must be at least {least}"
        if not 0 <= self.dropout_rate < 1:
            yield "dropout_rate", "must be in [0, 1)"
        for name in ("teacher_forcing", "teacher_forcing_end"):
            if not 0 <= getattr(self, name) <= 1:
                yield name, "must be in [0, 1]; 1 always feeds the reference word"
        choices = {
            "cell": tuple(CELLS),
            "attention": ("none", *ALIGNMENTS),
            "summary": SUMMARIES,
            "readout": READOUTS,
        }
        choices |= {"architecture": ("recurrent",), "dtype": ("float32", "bfloat16")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"
        if self.teacher_forcing_end != 1 and not self.teacher_forcing_steps:
            yield (
                "teacher_forcing_end",
                (
                    "needs teacher_forcing_steps: "
                    "set that to at least 1, or leave this at 1.0"
                ),
            )
        if self.bidirectional and self.encoder_dim % 2:
            yield (
                "encoder_dim",
                (
                    "must be even, "
                    "because each direction of a bidirectional encoder has half of it"
                ),
            )
        if self.bidirectional and self.reverse_source:
            yield (
                "reverse_source",
                "needs a unidirectional encoder: set this or bidirectional to False",
            )
        if not self.bidirectional and self.encoder_dim != self.d_model:
            rule = (
                f"must be equal to d_model = {self.d_model}, "
                "because the encoder's last state is the decoder's first"
            )
            yield "encoder_dim", f"{rule}: change it or set bidirectional to True"
        if self.attention == "dot" and self.encoder_dim != self.d_model:
            rule = f"must be equal to d_model = {self.d_model} for 'dot' attention"
            yield "encoder_dim", f"{rule}: change it or set attention to 'general'"
        if self.attention == "multi_head" and self.d_model % self.num_heads:
            yield "num_heads", f"must divide d_model = {self.d_model}"
        if (
            self.attention == "none"
            and self.bidirectional
            and self.summary == "initial"
        ):
            yield (
                "summary",
                (
                    "would ignore the forward direction of the encoder: "
                    "set it to 'every_step'"
                ),
            )
        for name in ("input_feeding", "local_window"):
            if getattr(self, name) and not self.luong_decoder:
                rest = "concat, dot, general, scaled_dot or multi_head"
                yield (
                    name,
                    f"needs Luong's decoder: switch it off, or set attention to {rest}",
                )
        if self.local_window and self.attention == "multi_head":
            yield (
                "local_window",
                (
                    "needs attention with one head: "
                    "set it to 0, or attention to 'scaled_dot'"
                ),
            )
        if self.readout == "maxout" and not self.reads_context:
            rest = (
                "attention = 'additive', "
                "or attention = 'none' with summary = 'every_step'"
            )
            yield "readout", f"needs {rest}: change these, or set readout to 'linear'"
        if self.summary == "every_step" and self.attention != "none":
            yield (
                "summary",
                "needs attention = 'none': change that, or set summary to 'initial'",
            )
        if self.damping and self.attention not in ("scaled_dot", "multi_head"):
            yield (
                "damping",
                (
                    "needs scores q·k/√d: "
                    "set attention to 'scaled_dot' or 'multi_head', or damping to False"
                ),
            )

    @property
    def luong_decoder(self) -> bool:
        """True if a step attends after its recurrence (Luong et al. 2015).

        Otherwise it attends before it (Bahdanau et al. 2015).
        """
        return self.attention not in ("none", "additive")

    @property
    def reads_context(self) -> bool:
        """True if the decoder's output depends directly on context and word.

        The word is the previous one. Otherwise the output depends on both only through
        the state.
        """
        return self.attention == "additive" or (
            self.attention == "none" and self.summary == "every_step"
        )

    @property
    def output_dim(self) -> int:
        """Width of the decoder's output.

        The output layer maps it to the vocabulary.
        """
        if not self.reads_context:
            return self.d_model
        return (
            self.readout_dim
            if self.readout == "maxout"
            else self.d_model + self.encoder_dim + self.embedding_dim
        )

    @property
    def reads_itself(self) -> bool:
        """True if training feeds predicted words back to the decoder."""
        return self.teacher_forcing < 1 or (
            self.teacher_forcing_steps > 0 and self.teacher_forcing_end < 1
        )

    def teacher_forcing_at(self, step: Array | int) -> Array:
        """Return the share of reference words that the decoder reads.

        `step` = 0, 1, … is the number of the update.
        """
        if not self.teacher_forcing_steps:
            return jnp.asarray(self.teacher_forcing)
        passed = jnp.minimum(step / self.teacher_forcing_steps, 1)
        return (
            self.teacher_forcing
            + (self.teacher_forcing_end - self.teacher_forcing) * passed
        )

    @property
    def shares_tables(self) -> bool:
        """Always False: source and target have separate embeddings."""
        return False

    @property
    def needs_warmup(self) -> bool:
        """Always False: the learning rate needs no warm-up."""
        return False

    def check(self) -> None:
        """Raise ValueError for the first of `problems`."""
        for field, rule in self.problems():
            raise UserError(
                f"RecurrentConfig.{field} = {getattr(self, field)!r}: {rule}"
            )


class State(NamedTuple):
    """The decoder's state between steps.

    It is the carry of each layer and, with input feeding, h̃ (B, D), else None.
    """

    carries: tuple[Carry, ...]
    fed: Array | None


class Cache(NamedTuple):
    """Everything that decoding keeps between steps.

    The batch axis comes first in every leaf. source_valid: (B, S).
    """

    past: State
    memory: Memory
    source_valid: Array


for _kind in (State, Memory, Cache):
    export.register_namedtuple_serialization(
        _kind, serialized_name=f"transformer_jax.recurrent.{_kind.__name__}"
    )


def make_cell(kind: str, width: int, name: str | None = None) -> Any:
    """Return a cell with a state of `width` units. `kind` is one of CELLS."""
    return CELLS[kind](
        width,
        kernel_init=named(nn.initializers.lecun_normal(), ("embed", "state")),
        recurrent_kernel_init=named(nn.initializers.orthogonal(), ("embed", "state")),
        bias_init=named(nn.initializers.zeros, ("state",)),
        name=name,
    )


class Encoder(nn.Module):
    """A stack of recurrent layers, unidirectional or bidirectional.

    No state depends on padding.
    """

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self, x: Array, valid: Array
    ) -> tuple[Array, Array, tuple[Carry, ...]]:
        """Read x (B, S, E) → h (B, S, C), summary (B, C), first carries.

        `valid` is (B, S). The carries are those of the decoder's layers. The summary is
        the last state of each direction in the top layer, concatenated.

        The last carry of a unidirectional encoder is the decoder's first carry. A
        bidirectional encoder applies tanh(W · + b) to the last carry of its backward
        direction, which reads the first word last (Bahdanau et al. 2015, Section A.2.2:
        s₀ = tanh(W_s ←h₁)).
        """
        c, lengths = self.config, valid.sum(axis=1)
        width = c.encoder_dim // 2 if c.bidirectional else c.encoder_dim
        first: list[Carry] = []
        ends: list[Carry] = []

        def read(x: Array, name: str, backwards: bool) -> tuple[Carry, Array]:
            cell = make_cell(c.cell, width, name)
            return nn.RNN(cell, return_carry=True, reverse=backwards, keep_order=True)(
                x, seq_lengths=lengths
            )

        for layer in range(c.num_layers):
            x = Dropout(c.dropout_rate)(x)
            carry, x_forward = read(x, f"forward_{layer}", c.reverse_source)
            if not c.bidirectional:
                x = x_forward
                ends = [carry]
                first.append(carry)
                continue
            back, x_backward = read(x, f"backward_{layer}", True)
            x, ends = jnp.concatenate([x_forward, x_backward], axis=-1), [carry, back]
            bridges = [
                Linear(
                    "BE,ED->BD",
                    (width, c.d_model),
                    ("embed", "state"),
                    dtype=c.dtype,
                    name=f"bridge_{layer}_{i}",
                )
                for i in range(len(jax.tree.leaves(back)))
            ]
            leaves = [
                jnp.tanh(bridge(h))
                for bridge, h in zip(bridges, jax.tree.leaves(back), strict=True)
            ]
            first.append(jax.tree.unflatten(jax.tree.structure(back), leaves))
        return (
            x,
            jnp.concatenate([jax.tree.leaves(end)[-1] for end in ends], axis=-1),
            tuple(first),
        )


class Decoder(nn.Module):
    """One step of the decoder.

    It leads from the previous word and state to the next state and output.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        c = self.config
        self.cells = [make_cell(c.cell, c.d_model) for _ in range(c.num_layers)]
        self.dropout = Dropout(c.dropout_rate)
        if c.attention != "none":
            self.alignment = ALIGNMENTS[c.attention](
                c.d_model,
                c.encoder_dim,
                c.attention_dim,
                c.num_heads if c.attention == "multi_head" else 1,
                c.damping,
                c.local_window,
                c.dtype,
            )
        if c.luong_decoder:  # W_c of Luong et al. 2015, eq. 5
            shape = c.encoder_dim + c.d_model, c.d_model
            axes = ("embed", "state")
            self.combine = Linear(
                "BC,CD->BD", shape, axes, use_bias=False, dtype=c.dtype
            )
        elif c.readout == "maxout" and c.reads_context:
            shape = c.d_model + c.encoder_dim + c.embedding_dim, 2 * c.readout_dim
            self.maxout = Linear("BC,CF->BF", shape, ("embed", "state"), dtype=c.dtype)

    def init_memory(self, h: Array, summary: Array) -> Memory:
        """Return the memory for h (B, S, C) and summary (B, C).

        All steps read the same memory.
        """
        if self.config.attention == "none":
            return Memory(h, h[:, :, None], summary)
        keys, values = self.alignment.project(h)
        return Memory(keys, values, summary)

    def __call__(
        self, state: State, y: Array, memory: Memory, valid: Array
    ) -> tuple[State, Array, Array]:
        """Read y (B, E) → the next state, output (B, output_dim), weights (B, N, S).

        The memory may have fewer rows, B / K. Each of its rows is then shared by K
        adjacent rows of y.

        "additive" attention: c_t is attended from s_{t-1}, s_t = f(s_{t-1}, [y; c_t]),
        and the output is g(s_t, c_t, y) (Bahdanau et al. 2015, Section A.2.2).
        "none" with summary "every_step": the same, with the summary as c_t. With
        "initial": s_t = f(s_{t-1}, y), which is also the output. There are no weights
        (N = 0).
        Any other attention: s_t = f(s_{t-1}, y), or f(s_{t-1}, [y; h̃_{t-1}]) with
        input feeding. c_t is attended from s_t, and the output is h̃_t = tanh(W_c [c_t;
        s_t]) (Luong et al. 2015, eq. 5).
        """
        c = self.config
        rows = memory.summary.shape[0]

        def look(s: Array) -> tuple[Array, Array]:
            context, weights = self.alignment(
                s.reshape(rows, -1, s.shape[-1]), memory, valid
            )
            weights = weights.swapaxes(1, 2).reshape(s.shape[0], -1, weights.shape[-1])
            return context.reshape(s.shape[0], -1), weights

        weights = jnp.zeros((y.shape[0], 0, valid.shape[1]))
        if c.luong_decoder:
            carries, s = self._recur(
                state.carries,
                y if state.fed is None else jnp.concatenate([y, state.fed], -1),
            )
            context, weights = look(s)
            output = jnp.tanh(self.combine(jnp.concatenate([context, s], axis=-1)))
            return (
                State(carries, None if state.fed is None else output),
                output,
                weights,
            )
        if c.attention == "none" and c.summary == "initial":
            carries, s = self._recur(state.carries, y)
            return State(carries, None), s, weights
        if c.attention == "none":
            context = jnp.repeat(memory.summary, y.shape[0] // rows, axis=0)
        else:
            context, weights = look(jax.tree.leaves(state.carries[-1])[-1])
        carries, s = self._recur(state.carries, jnp.concatenate([y, context], axis=-1))
        output = jnp.concatenate([s, context, y], axis=-1)
        if c.readout == "maxout":  # Goodfellow et al. 2013
            output = (
                self.maxout(output).reshape(y.shape[0], c.readout_dim, 2).max(axis=-1)
            )
        return State(carries, None), output, weights

    def _recur(
        self, carries: tuple[Carry, ...], x: Array
    ) -> tuple[tuple[Carry, ...], Array]:
        """Run the cells of all layers, with dropout between layers."""
        after = []
        for layer, (cell, carry) in enumerate(zip(self.cells, carries, strict=True)):
            carry, x = cell(carry, x if layer == 0 else self.dropout(x))
            after.append(carry)
        return tuple(after), x


class RecurrentSeq2Seq(nn.Module):
    """A recurrent encoder–decoder.

    Training and decoding have the same interface as `Transformer`.

    Differs:

    - The cells are those of Flax, in float32. The GRU applies its reset gate after the
      recurrent product, like cuDNN. The LSTM has no peepholes.
    - Word vectors are multiplied by √E, as in the Transformer.
    - The summary is the encoder's last state. Cho et al. use tanh(V h), and tanh(V' c)
      as the decoder's first state.
    - The deep output of Bahdanau et al. reads s_t, as in their equation 4; their
      appendix has s_{t-1}. The default readout is one linear map of [s_t; c_t; y].

    The encoder of Luong et al. is unidirectional, and its last states are the decoder's
    first; the same holds here unless `bidirectional` is set.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        c = self.config
        c.check()
        self.source_embedding = Embedding(
            c.source_vocab_size, c.embedding_dim, c.vocab_multiple
        )
        self.target_embedding = Embedding(
            c.target_vocab_size, c.embedding_dim, c.vocab_multiple
        )
        self.encoder, self.decoder = Encoder(c), Decoder(c)
        padded = layers.padded_vocab_size(c.target_vocab_size, c.vocab_multiple)
        self.output = OutputLayer(c.output_dim, padded, use_bias=True)
        self.dropout = Dropout(c.dropout_rate)

    def __call__(
        self,
        source: Array,
        target: Array,
        source_valid: Valid = None,
        target_valid: Valid = None,
    ) -> Array:
        """Map source ids (B, S) and target ids (B, T) to logits of the next token.

        The logits are float32 (B, T, padded V). See `hidden` for the other arguments.
        """
        x, lm_head = self.hidden(source, target, source_valid, target_valid)
        return lm_head(x, self.config.target_vocab_size, self.config.dtype)

    def hidden(
        self,
        source: Array,
        target: Array,
        source_valid: Valid = None,
        target_valid: Valid = None,
        step: Any = 0,
    ) -> tuple[Array, LMHead]:
        """Return the decoder's output (B, T, output_dim) and its map to logits.

        The attention weights (B, N, T, S) are sown as "weights" in the collection
        "intermediates".

        `source_valid` (B, S) is True at tokens and False at the padding that follows
        them. `target_valid` is ignored, because a state depends only on earlier
        positions.

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
        valid = jnp.ones(source.shape, bool) if source_valid is None else source_valid
        cache = self.init_cache(source, valid, target.shape[1])
        given = None
        if self.has_rng("dropout") and self.config.reads_itself:
            rate = self.config.teacher_forcing_at(step)
            given = (
                jax.random.bernoulli(self.make_rng("dropout"), rate, target.shape[1:])
                .at[0]
                .set(True)
            )
        x, weights, _ = self._run(cache, target, given)
        self.sow("intermediates", "weights", weights)
        return self.dropout(x), self.output.lm_head()

    def init_cache(
        self, source: Array, source_valid: Array, length: int, hypotheses: int = 1
    ) -> Cache:
        """Run the encoder once and return the cache.

        `length` and `hypotheses` are ignored; they exist for parity with `Transformer`.
        """
        c = self.config
        check_ids("source", source, c.source_vocab_size)
        check_valid("source_valid", source_valid, source.shape, at_end=True)
        h, summary, carries = self.encoder(self.source_embedding(source), source_valid)
        fed = jnp.zeros((source.shape[0], c.d_model)) if c.input_feeding else None
        return Cache(
            State(carries, fed), self.decoder.init_memory(h, summary), source_valid
        )

    def extend(
        self, cache: Cache, target: Array, position: Array | int
    ) -> tuple[Array, Cache]:
        """Read target ids (B, T) → logits (B, T, padded V), the new cache.

        The ids follow those in the cache. `position` is ignored; it exists for parity
        with `Transformer`.
        """
        x, _, past = self._run(cache, target, None)
        lm_head = self.output.lm_head()
        return lm_head(
            x, self.config.target_vocab_size, self.config.dtype
        ), cache._replace(past=past)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention maps as `Transformer.attention_maps` does.

        There is one layer, or no map without attention.
        """
        return (
            {("alignment", "target", "source"): sown["weights"][0][:, None]}
            if self.config.attention != "none"
            else {}
        )

    @nn.nowrap
    def for_extend(self, params: Any) -> Any:
        """Return the parameters unchanged.

        This method exists for parity with `Transformer`.
        """
        return params

    def _run(
        self, cache: Cache, target: Array, given: Array | None
    ) -> tuple[Array, Array, State]:
        """Read target ids (B, T) → outputs, weights (B, N, T, S), state.

        The outputs are (B, T, output_dim). Where `given` (T,) is False, the decoder
        reads the most probable word after the previous position, not the target's. None
        stands for True everywhere.
        """
        c, lm_head = self.config, self.output.lm_head()

        def word(model: RecurrentSeq2Seq, tokens: Array) -> Array:
            return model.dropout(model.target_embedding(tokens))

        def step(
            model: RecurrentSeq2Seq, before: tuple[State, Array], inputs: tuple
        ) -> tuple[tuple, tuple]:
            (state, own), (y, coins) = before, inputs
            if coins is not None:
                y = jnp.where(coins[0], y, word(model, own[:, None])[:, 0])
            state, output, weights = model.decoder(
                state, y, cache.memory, cache.source_valid
            )
            # compute the most probable word only if the next step reads it
            if coins is not None:

                def said(x: Array) -> Array:
                    return (
                        lm_head(x[:, None], c.target_vocab_size, c.dtype)[:, 0]
                        .argmax(axis=-1)
                        .astype(own.dtype)
                    )

                own = jax.lax.cond(
                    coins[1], lambda x: own, said, jax.lax.stop_gradient(output)
                )
            return (state, own), (output, weights)

        scan = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=((1, 0),),
            out_axes=(1, 2),
        )
        # of this and the next step
        coins = (
            None if given is None else jnp.stack([given, jnp.roll(given, -1)], axis=1)
        )
        (past, _), (x, weights) = scan(
            self, (cache.past, target[:, 0]), (word(self, target), coins)
        )
        return x, weights, past
