"""The recurrent encoder–decoder: from one vector for a whole sentence to attention.

Sutskever et al. 2014 and Cho et al. 2014 (no attention), Bahdanau et al. 2015 (additive), Luong et al. 2015 (concat,
dot, general) and, in Luong's decoder, queries, keys and values as in Vaswani et al. 2017 (scaled_dot, multi_head). The
scores are in `alignment`.

Shapes: B batch · S source positions · T target positions · E embedding · C encoder's output · D decoder's state
(d_model) · N heads · V vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import fields
from transformer_jax.models import layers
from transformer_jax.models.alignment import ALIGNMENTS, Memory
from transformer_jax.models.attention import Valid
from transformer_jax.models.layers import Dropout, Embedding, Linear, LMHead, OutputLayer

Array = jax.Array
Carry = Any  # of a cell: h (B, D), and for an LSTM (c, h)

CELLS: dict[str, Any] = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}
ATTENTIONS = ("none", *ALIGNMENTS)
SUMMARIES = ("initial", "every_step")
READOUTS = ("linear", "maxout")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """One choice, `attention`, and what the papers vary besides."""

    architecture: str = dataclasses.field(default="recurrent", kw_only=True)
    source_vocab_size: int = fields.size(10_000, 304)
    target_vocab_size: int = fields.size(10_000, 304)
    cell: str = "gru"
    num_layers: int = 1
    embedding_dim: int = fields.size(256, 8)  # E
    encoder_dim: int = fields.size(512, 32, like="d_model")  # C: output at a position, both directions together
    d_model: int = fields.size(512, 16)  # D: the decoder's state
    bidirectional: bool = False
    reverse_source: bool = False  # a one-way encoder reads from the last word to the first (Sutskever et al. 2014)
    attention: str = "none"
    # Without attention, where the encoder's last state goes: into the decoder's first state (Sutskever et al. 2014), or
    # also into every step and its output (Cho et al. 2014).
    summary: str = "initial"
    attention_dim: int = fields.size(512, 8)  # hidden units of additive and concat
    num_heads: int = fields.size(8, 8)  # of multi_head
    input_feeding: bool = False  # each step's output is input to the next step (Luong et al. 2015, Section 3.3)
    local_window: int = 0  # D of Luong's local-p; 0: attention is global
    damping: bool = False  # see `alignment.damped_scores`
    # What is mapped to the vocabulary by additive attention and by summary = "every_step".
    readout: str = "linear"
    readout_dim: int = fields.size(500, 8)  # of "maxout"
    # The share of steps in training that read the reference's word and not the model's own. It moves linearly from the
    # first value to the second in so many steps (Bengio et al. 2015, Section 2.4); 0 steps: always the first.
    teacher_forcing: float = fields.random(1.0, 1.0)
    teacher_forcing_end: float = fields.random(1.0, 1.0)
    teacher_forcing_steps: int = fields.random(0, 0)
    dropout_rate: float = fields.random(0.5, 0.0)
    max_length: int = fields.size(1024, 32)
    vocab_multiple: int = 1
    dtype: str = fields.how("float32")  # of the products outside the cells

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for everything that is wrong."""
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in ("local_window", "teacher_forcing_steps") else 1
            if type(value) is int and value < least:
                yield name, f"must be at least {least}"
        if not 0 <= self.dropout_rate < 1:
            yield "dropout_rate", "must be in [0, 1)"
        for name in ("teacher_forcing", "teacher_forcing_end"):
            if not 0 <= getattr(self, name) <= 1:
                yield name, "must be in [0, 1]; 1 always feeds the reference"
        choices = {"cell": tuple(CELLS), "attention": ATTENTIONS, "summary": SUMMARIES, "readout": READOUTS}
        choices |= {"architecture": ("recurrent",), "dtype": ("float32", "bfloat16")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield name, f"must be one of {', '.join(allowed)}"
        if self.teacher_forcing_end != 1 and not self.teacher_forcing_steps:
            yield "teacher_forcing_end", "is reached after teacher_forcing_steps = 0: set those, or leave it at 1.0"
        if self.bidirectional and self.encoder_dim % 2:
            yield "encoder_dim", "must be even: half of it belongs to each direction of a bidirectional encoder"
        if self.bidirectional and self.reverse_source:
            yield "reverse_source", "is for encoders that read one way: set it or model.bidirectional to False"
        if not self.bidirectional and self.encoder_dim != self.d_model:
            yield "encoder_dim", f"must be d_model = {self.d_model}, whose first state it is, or set bidirectional"
        if self.attention == "dot" and self.encoder_dim != self.d_model:
            yield "encoder_dim", f"must be d_model = {self.d_model} for sᵀh; 'general' has a matrix between them"
        if self.attention == "multi_head" and self.d_model % self.num_heads:
            yield "num_heads", f"must divide d_model = {self.d_model}"
        if self.attention == "none" and self.bidirectional and self.summary == "initial":
            yield "summary", "'initial' would leave out what the forward direction read: set it to 'every_step'"
        for name in ("input_feeding", "local_window"):
            if getattr(self, name) and not self.luong_decoder:
                rest = "concat, dot, general, scaled_dot or multi_head"
                yield name, f"belongs to Luong's decoder: switch it off, or set attention to {rest}"
        if self.local_window and self.attention == "multi_head":
            yield "local_window", "is for one head: set it to 0 or attention to 'scaled_dot'"
        if self.readout == "maxout" and not self.reads_context:
            yield "readout", "'maxout' needs additive attention, or none with summary 'every_step': set it to 'linear'"
        if self.summary == "every_step" and self.attention != "none":
            yield "summary", "is for attention = 'none', which has no other context: set it to 'initial'"
        if self.damping and self.attention not in ("scaled_dot", "multi_head"):
            yield "damping", "is of s = q·k/√d: set attention to 'scaled_dot' or 'multi_head', or this to False"

    @property
    def luong_decoder(self) -> bool:
        """True if a step attends after its recurrence (Luong et al. 2015), and not before it (Bahdanau et al. 2015)."""
        return self.attention not in ("none", "additive")

    @property
    def reads_context(self) -> bool:
        """True if context and previous word are mapped to the vocabulary along with the state."""
        return self.attention == "additive" or (self.attention == "none" and self.summary == "every_step")

    @property
    def output_dim(self) -> int:
        """Width of what is mapped to the vocabulary."""
        if not self.reads_context:
            return self.d_model
        return self.readout_dim if self.readout == "maxout" else self.d_model + self.encoder_dim + self.embedding_dim

    @property
    def reads_itself(self) -> bool:
        """True if training feeds the decoder words of its own."""
        return self.teacher_forcing < 1 or (self.teacher_forcing_steps > 0 and self.teacher_forcing_end < 1)

    def teacher_forcing_at(self, step: Array | int) -> Array:
        """Return the share of words that update `step` = 0, 1, … takes from the reference."""
        if not self.teacher_forcing_steps:
            return jnp.asarray(self.teacher_forcing)
        passed = jnp.minimum(step / self.teacher_forcing_steps, 1)
        return self.teacher_forcing + (self.teacher_forcing_end - self.teacher_forcing) * passed

    @property
    def shares_tables(self) -> bool:
        """Always False: source and target each have an embedding."""
        return False

    @property
    def needs_warmup(self) -> bool:
        """Always False: the learning rate needs no warm-up."""
        return False

    def check(self) -> None:
        """Raise ValueError for the first of `problems`."""
        for field, rule in self.problems():
            raise ValueError(f"RecurrentConfig.{field} = {getattr(self, field)!r}: {rule}")


class State(NamedTuple):
    """The decoder's state between steps: each layer's carry and, for input feeding, h̃ (B, D)."""

    carries: tuple[Carry, ...]
    fed: Array | None


class Cache(NamedTuple):
    """The state of decoding between steps. The batch axis comes first in every leaf. source_valid: (B, S)."""

    past: State
    memory: Memory
    source_valid: Array


def _cell(config: RecurrentConfig, width: int, name: str | None = None) -> Any:
    init = nn.with_logical_partitioning
    return CELLS[config.cell](
        width,
        kernel_init=init(nn.initializers.lecun_normal(), ("embed", "state")),
        recurrent_kernel_init=init(nn.initializers.orthogonal(), ("embed", "state")),
        bias_init=init(nn.initializers.zeros, ("state",)),
        name=name,
    )


class Encoder(nn.Module):
    """Layers of one or two directions. No state sees padding."""

    config: RecurrentConfig

    @nn.compact
    def __call__(self, x: Array, valid: Array) -> tuple[Array, Array, tuple[Carry, ...]]:
        """Read x (B, S, E), valid (B, S) → h (B, S, C), summary (B, C), and the decoder's first carry for each layer.

        The summary is the last state of each direction. A one-way encoder hands its last carry to the decoder as it is.
        Of two directions the backward one, which reads the first word last, hands over tanh(W ·) of its carry (Bahdanau
        et al. 2015, A.2.2: s₀ = tanh(W_s ←h₁)).
        """
        c, lengths = self.config, valid.sum(axis=1)
        width = c.encoder_dim // 2 if c.bidirectional else c.encoder_dim
        first: list[Carry] = []
        ends: list[Carry] = []

        def read(x: Array, name: str, backwards: bool) -> tuple[Carry, Array]:
            cell = _cell(c, width, name)
            return nn.RNN(cell, return_carry=True, reverse=backwards, keep_order=True)(x, seq_lengths=lengths)

        for layer in range(c.num_layers):
            x = Dropout(c.dropout_rate)(x)
            carry, x_forward = read(x, f"forward_{layer}", c.reverse_source)
            if not c.bidirectional:
                x, ends = x_forward, [carry]
                first.append(carry)
                continue
            back, x_backward = read(x, f"backward_{layer}", True)
            x, ends = jnp.concatenate([x_forward, x_backward], axis=-1), [carry, back]
            bridges = [
                Linear((width, c.d_model), ("embed", "state"), dtype=c.dtype, name=f"bridge_{layer}_{i}")
                for i in range(len(jax.tree.leaves(back)))
            ]
            leaves = [jnp.tanh(bridge(h)) for bridge, h in zip(bridges, jax.tree.leaves(back), strict=True)]
            first.append(jax.tree.unflatten(jax.tree.structure(back), leaves))
        return x, jnp.concatenate([jax.tree.leaves(end)[-1] for end in ends], axis=-1), tuple(first)


class Decoder(nn.Module):
    """One step: from the previous word and state to the next state and to what is mapped to the vocabulary."""

    config: RecurrentConfig

    def setup(self) -> None:
        c = self.config
        self.cells = [_cell(c, c.d_model) for _ in range(c.num_layers)]
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
            self.combine = Linear(shape, ("embed", "state"), use_bias=False, dtype=c.dtype)
        elif c.readout == "maxout" and c.reads_context:
            shape = c.d_model + c.encoder_dim + c.embedding_dim, 2 * c.readout_dim
            self.maxout = Linear(shape, ("embed", "state"), dtype=c.dtype)

    def init_memory(self, h: Array, summary: Array) -> Memory:
        """Return what all steps share."""
        keys, values = (h, h[:, :, None]) if self.config.attention == "none" else self.alignment.project(h)
        return Memory(keys, values, summary)

    def __call__(self, state: State, y: Array, memory: Memory, valid: Array) -> tuple[State, Array, Array]:
        """Read y (B, E) → the next state, output (B, output_dim), weights (B, N, S).

        A memory of fewer rows, B / K, is shared: each of its rows by K adjacent rows of y.

        additive: c_t from s_{t-1}, s_t = f(s_{t-1}, [y; c_t]), output g(s_t, c_t, y) (Bahdanau et al. 2015, A.2.2).
        none: the same with the summary for c_t, or s_t alone.
        else: s_t = f(s_{t-1}, [y; h̃_{t-1} if fed]), c_t from s_t, h̃_t = tanh(W_c [c_t; s_t]) (Luong et al. 2015).
        """
        c, rows = self.config, memory.summary.shape[0]

        def look(s: Array) -> tuple[Array, Array]:
            context, weights = self.alignment(s.reshape(rows, -1, s.shape[-1]), memory, valid)
            weights = weights.swapaxes(1, 2).reshape(len(s), -1, weights.shape[-1])
            return context.reshape(len(s), -1), weights

        weights = jnp.zeros((len(y), 0, valid.shape[1]))
        if c.luong_decoder:
            carries, s = self._recur(state.carries, y if state.fed is None else jnp.concatenate([y, state.fed], -1))
            context, weights = look(s)
            output = jnp.tanh(self.combine(jnp.concatenate([context, s], axis=-1)))
            return State(carries, None if state.fed is None else output), output, weights
        if c.attention == "none" and c.summary == "initial":
            carries, s = self._recur(state.carries, y)
            return State(carries, None), s, weights
        if c.attention == "none":
            context = jnp.repeat(memory.summary, len(y) // rows, axis=0)
        else:
            context, weights = look(jax.tree.leaves(state.carries[-1])[-1])
        carries, s = self._recur(state.carries, jnp.concatenate([y, context], axis=-1))
        output = jnp.concatenate([s, context, y], axis=-1)
        if c.readout == "maxout":  # Goodfellow et al. 2013
            output = self.maxout(output).reshape(len(y), c.readout_dim, 2).max(axis=-1)
        return State(carries, None), output, weights

    def _recur(self, carries: tuple[Carry, ...], x: Array) -> tuple[tuple[Carry, ...], Array]:
        """Run all layers' cells, with dropout between them."""
        after = []
        for layer, (cell, carry) in enumerate(zip(self.cells, carries, strict=True)):
            carry, x = cell(carry, x if layer == 0 else self.dropout(x))
            after.append(carry)
        return tuple(after), x


class RecurrentSeq2Seq(nn.Module):
    """The encoder–decoder model. It is called and decodes like `Transformer`.

    Differs: cells are flax's, in float32: the GRU applies its reset gate after the recurrent product (like cuDNN), and
    the LSTM has no peepholes. Word vectors are scaled like the Transformer's. The summary is the encoder's last state
    itself, where Cho et al. have tanh(V h) and a first state tanh(V' c). The deep output of Bahdanau et al. sees s_t,
    as in their equation 4, not s_{t-1} as in their appendix; the default readout is one linear map of [s_t; c_t; y].
    Luong et al.'s encoder is one-way and hands its states to the decoder; so does this one without `bidirectional`.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        c = self.config
        c.check()
        self.source_embedding = Embedding(c.source_vocab_size, c.embedding_dim, c.vocab_multiple)
        self.target_embedding = Embedding(c.target_vocab_size, c.embedding_dim, c.vocab_multiple)
        self.encoder, self.decoder = Encoder(c), Decoder(c)
        padded = layers.padded_vocab_size(c.target_vocab_size, c.vocab_multiple)
        self.output = OutputLayer(c.output_dim, padded, use_bias=True)
        self.dropout = Dropout(c.dropout_rate)

    def __call__(self, source: Array, target: Array, source_valid: Valid = None, target_valid: Valid = None) -> Array:
        """Map source ids (B, S) and target ids (B, T) to float32 logits (B, T, padded V) of the token after each."""
        x, lm_head = self.hidden(source, target, source_valid, target_valid)
        return lm_head(x, self.config.target_vocab_size, self.config.dtype)

    def hidden(
        self, source: Array, target: Array, source_valid: Valid = None, target_valid: Valid = None, step: Any = 0
    ) -> tuple[Array, LMHead]:
        """Return the decoder's output (B, T, output_dim) and its map to logits. Weights (B, N, T, S) are sown.

        `source_valid`: True at tokens, False at the padding after them. A state sees only what comes before it, so
        `target_valid` is not needed. In training, at update `step`, a share of positions set by the config reads the
        word that the model itself finds most probable and not the one in `target` (Bengio et al. 2015).

        Differs: one coin is flipped per position, for all rows together, where Bengio et al. flip one per word. The
        product with the vocabulary is then skipped where no row needs it. Unlike decoding, this may choose padding or
        the begin-of-sentence id.
        """
        valid = jnp.ones(source.shape, bool) if source_valid is None else source_valid
        cache = self.init_cache(source, valid, target.shape[1])
        given = None
        if self.has_rng("dropout") and self.config.reads_itself:
            rate = self.config.teacher_forcing_at(step)
            given = jax.random.bernoulli(self.make_rng("dropout"), rate, target.shape[1:]).at[0].set(True)
        x, weights, _ = self._run(cache, target, given)
        self.sow("intermediates", "weights", weights)
        return self.dropout(x), self.output.lm_head()

    def init_cache(self, source: Array, source_valid: Array, length: int) -> Cache:
        """Run the encoder once. `length` is not used: a recurrent state needs no room."""
        c = self.config
        h, summary, carries = self.encoder(self.source_embedding(source), source_valid)
        fed = jnp.zeros((len(source), c.d_model)) if c.input_feeding else None
        return Cache(State(carries, fed), self.decoder.init_memory(h, summary), source_valid)

    def extend(self, cache: Cache, target: Array, position: Array | int) -> tuple[Array, Cache]:
        """Read target ids (B, T), which follow those in the cache → logits (B, T, padded V) and the new cache."""
        x, _, past = self._run(cache, target, None)
        lm_head = self.output.lm_head()
        return lm_head(x, self.config.target_vocab_size, self.config.dtype), cache._replace(past=past)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return what `Transformer.attention_maps` does: here one layer, or nothing without attention."""
        return (
            {("alignment", "target", "source"): sown["weights"][0][:, None]} if self.config.attention != "none" else {}
        )

    @nn.nowrap
    def for_extend(self, params: Any) -> Any:
        """Return the parameters in the form that is fastest for `extend` in a loop."""
        return params

    def _run(self, cache: Cache, target: Array, given: Array | None) -> tuple[Array, Array, State]:
        """Read the target → outputs (B, T, output_dim), weights (B, N, T, S), state.

        Where `given` (T,) is False, the model reads the word that it found most probable.
        """
        c, lm_head = self.config, self.output.lm_head()

        def word(model: RecurrentSeq2Seq, tokens: Array) -> Array:
            return model.dropout(model.target_embedding(tokens))

        def step(model: RecurrentSeq2Seq, before: tuple[State, Array], inputs: tuple) -> tuple[tuple, tuple]:
            (state, own), (y, coins) = before, inputs
            if coins is not None:
                y = jnp.where(coins[0], y, word(model, own[:, None])[:, 0])
            state, output, weights = model.decoder(state, y, cache.memory, cache.source_valid)
            if coins is not None:  # the most probable word, if the next step reads it

                def said(x: Array) -> Array:
                    return lm_head(x[:, None], c.target_vocab_size, c.dtype)[:, 0].argmax(axis=-1).astype(own.dtype)

                own = jax.lax.cond(coins[1], lambda x: own, said, jax.lax.stop_gradient(output))
            return (state, own), (output, weights)

        scan = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=((1, 0),),
            out_axes=(1, 2),
        )
        coins = None if given is None else jnp.stack([given, jnp.roll(given, -1)], axis=1)  # this step's, the next's
        (past, _), (x, weights) = scan(self, (cache.past, target[:, 0]), (word(self, target), coins))
        return x, weights, past
