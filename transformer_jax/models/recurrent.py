"""The recurrent encoder–decoder, on the road from one vector for a whole sentence to attention.

Sutskever et al. 2014 and Cho et al. 2014 (no attention), Bahdanau et al. 2015 (additive), Luong et al. 2015 (concat,
dot, general) and, on Luong's decoder, queries, keys and values as in Vaswani et al. 2017 (scaled_dot, multi_head).

Shapes: B batch · S source positions · T target positions · E embedding · C encoder's output · D decoder's state
(d_model) · A hidden units of a score · N heads · V vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models import layers
from transformer_jax.models.attention import (
    additive_scores,
    attention_weights,
    damped_scores,
    dot_scores,
    general_scores,
    local_weights,
    padding_mask,
    scaled_dot_product_scores,
)
from transformer_jax.models.layers import Dropout, Embedding, Linear, OutputLayer, Projection, einsum, parameter

Array = jax.Array
Carry = Any  # of a cell: h (B, D), and for an LSTM (c, h)

CELLS: dict[str, Any] = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}
ATTENTIONS = ("none", "additive", "concat", "dot", "general", "scaled_dot", "multi_head")
SUMMARIES = ("initial", "every_step")
READOUTS = ("linear", "maxout")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """What the keys mean is one axis, `attention`, and what the papers along it vary besides."""

    architecture: str = dataclasses.field(default="recurrent", kw_only=True)
    source_vocab_size: int = 10_000
    target_vocab_size: int = 10_000
    cell: str = "gru"
    num_layers: int = 1
    embedding_dim: int = 256  # E
    encoder_dim: int = 512  # C: of the encoder's output at a position, both directions together
    d_model: int = 512  # D: of the decoder's state
    bidirectional: bool = False
    reverse_source: bool = False  # a one-way encoder reads from the last word to the first (Sutskever et al. 2014)
    attention: str = "none"
    # Without attention, where the encoder's last state goes: into the decoder's first state (Sutskever et al. 2014), or
    # also into every step and its output (Cho et al. 2014).
    summary: str = "initial"
    attention_dim: int = 512  # A, of additive and concat
    num_heads: int = 8  # of multi_head
    input_feeding: bool = False  # the step before's output is input to the next (Luong et al. 2015, Section 3.3)
    local_window: int = 0  # D of Luong's local-p; 0: attention is global
    damping: bool = False  # see `damped_scores`
    # Of additive attention and of summary = "every_step": what projects to the vocabulary.
    readout: str = "linear"
    readout_dim: int = 500  # of "maxout"
    # How often the reference's word is fed in training, not the model's own: from the first to the second in so many
    # steps, along a line (Bengio et al. 2015, Section 2.4); 0 steps: always the first.
    teacher_forcing: float = 1.0
    teacher_forcing_end: float = 1.0
    teacher_forcing_steps: int = 0
    dropout_rate: float = 0.5
    max_length: int = 1024
    vocab_multiple: int = 1
    dtype: str = "float32"  # of the products outside the cells

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong, as (field, rule and remedy)."""
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
            if getattr(self, name) and not self.follows:
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
    def follows(self) -> bool:
        """Whether attention follows the recurrence, as in Luong et al. 2015."""
        return self.attention not in ("none", "additive")

    @property
    def reads_context(self) -> bool:
        """Whether what is projected to the vocabulary sees context and word before, beside the state."""
        return self.attention == "additive" or (self.attention == "none" and self.summary == "every_step")

    @property
    def output_dim(self) -> int:
        """Of what is projected to the vocabulary."""
        if not self.reads_context:
            return self.d_model
        return self.readout_dim if self.readout == "maxout" else self.d_model + self.encoder_dim + self.embedding_dim

    @property
    def reads_itself(self) -> bool:
        """Whether training feeds the decoder words of its own."""
        return self.teacher_forcing < 1 or (self.teacher_forcing_steps > 0 and self.teacher_forcing_end < 1)

    def teacher_forcing_at(self, step: Array | int) -> Array:
        """The share of words that update `step` = 0, 1, … takes from the reference."""
        if not self.teacher_forcing_steps:
            return jnp.asarray(self.teacher_forcing)
        passed = jnp.minimum(step / self.teacher_forcing_steps, 1)
        return self.teacher_forcing + (self.teacher_forcing_end - self.teacher_forcing) * passed

    @property
    def shares_tables(self) -> bool:
        """Whether source and target have one embedding."""
        return False

    @property
    def needs_warmup(self) -> bool:
        """Of the learning rate."""
        return False

    @staticmethod
    def shrink(model: Any) -> None:
        """Makes sizes in a recipe's section (ConfigDict) those of seconds."""
        model.num_heads, model.embedding_dim, model.attention_dim, model.readout_dim = 2, 8, 8, 8
        model.d_model, model.encoder_dim = 16, 16 if model.encoder_dim == model.d_model else 32

    def check(self) -> None:
        """Raises ValueError for the first of `problems`."""
        for field, rule in self.problems():
            raise ValueError(f"RecurrentConfig.{field} = {getattr(self, field)!r}: {rule}")


class State(NamedTuple):
    """What a decoder's step hands to the next. carries: a cell's, for each layer; fed: h̃ (B, D) of input feeding."""

    carries: tuple[Carry, ...]
    fed: Array | None


class Memory(NamedTuple):
    """What the decoder knows of the source: keys as scores want them, values (B, S, N, H) and summary (B, C)."""

    keys: Array
    values: Array
    summary: Array


class Cache(NamedTuple):
    """What decoding keeps between steps; the batch axis comes first in every leaf. source_valid: (B, S)."""

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
    """One or two directions, in layers. Padding is seen by no state."""

    config: RecurrentConfig

    @nn.compact
    def __call__(self, x: Array, valid: Array) -> tuple[Array, Array, tuple[Carry, ...]]:
        """x (B, S, E), valid (B, S) → h (B, S, C), summary (B, C), and the decoder's first carry for each layer.

        The summary is the last state of each direction. One direction hands its last carry to the decoder as it is;
        of two the backward one does, which has last read the first word, by tanh(W ·) (Bahdanau et al. 2015, A.2.2:
        s₀ = tanh(W_s ←h₁)).
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


class Alignment(nn.Module):
    """Which source positions a state looks at, and what it sees there."""

    config: RecurrentConfig

    def setup(self) -> None:
        c, d, e = self.config, self.config.d_model, self.config.encoder_dim

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear((inputs, outputs), ("embed", "state"), use_bias=False, dtype=c.dtype)

        if c.attention in ("additive", "concat"):  # W_a and U_a, or the two halves of W
            self.query, self.key = linear(d, c.attention_dim), linear(e, c.attention_dim)
            self.v = parameter(self, "v", nn.initializers.normal(c.attention_dim**-0.5), (c.attention_dim,), ("state",))
        elif c.attention == "general":
            init = nn.initializers.xavier_uniform()
            self.w = parameter(self, "w", init, (d, e), ("embed", "state"))
        elif c.attention in ("scaled_dot", "multi_head"):
            heads = c.num_heads if c.attention == "multi_head" else 1
            names, shape = ("embed", "state", "head_dim"), (heads, d // heads)
            self.query = Linear((d, *shape), names, use_bias=False, dtype=c.dtype)
            self.key = Linear((e, *shape), names, use_bias=False, dtype=c.dtype)
            self.value = Linear((e, *shape), names, use_bias=False, dtype=c.dtype)
            to_output = ("state", "head_dim", "embed")
            self.output = Linear((*shape, e), to_output, num_inputs=2, use_bias=False, dtype=c.dtype)
        if c.damping:
            self.damping = parameter(self, "damping", nn.initializers.zeros, (), ())
        if c.local_window:
            self.position = linear(d, d)
            self.position_v = parameter(self, "position_v", nn.initializers.normal(d**-0.5), (d,), ("state",))

    def project(self, h: Array) -> tuple[Array, Array]:
        """h (B, S, C) → keys and values, once a sentence."""
        if self.config.attention in ("additive", "concat"):
            return self.key(h), h[:, :, None]
        if self.config.attention in ("scaled_dot", "multi_head"):
            return self.key(h), self.value(h)
        return h, h[:, :, None]

    def scores(self, query: Array, keys: Array) -> Array:
        """States (B, T, D) against keys → (B, N, T, S)."""
        c = self.config
        if c.attention in ("scaled_dot", "multi_head"):
            return scaled_dot_product_scores(self.query(query), keys, c.dtype)
        if c.attention in ("additive", "concat"):
            scores = additive_scores(self.query(query), keys, self.v)
        elif c.attention == "general":
            scores = general_scores(query, keys, self.w, c.dtype)
        else:
            scores = dot_scores(query, keys, c.dtype)
        return scores[:, None]

    def __call__(self, query: Array, memory: Memory, valid: Array) -> tuple[Array, Array]:
        """query (B, T, D), valid (B, S) → contexts (B, T, C), weights (B, N, T, S)."""
        c = self.config
        scores = self.scores(query, memory.keys)
        if c.damping:
            scores = damped_scores(scores, self.damping)
        if c.local_window:  # p = S · sigmoid(v_pᵀ tanh(W_p s)), Luong et al. 2015, eq. 9
            where = nn.sigmoid(einsum("BTD,D->BT", jnp.tanh(self.position(query)), self.position_v, c.dtype))
            center = where * valid.sum(axis=1, keepdims=True)
            weights = local_weights(scores[:, 0], center, c.local_window, valid[:, None])[:, None]
        else:
            weights = attention_weights(scores, padding_mask(valid))
        seen = einsum("BNTS,BSNH->BTNH", weights, memory.values, c.dtype)
        return (self.output(seen) if c.attention in ("scaled_dot", "multi_head") else seen[:, :, 0]), weights


class Decoder(nn.Module):
    """One step: the word before and the state before → the next state, and what is projected to the vocabulary."""

    config: RecurrentConfig

    def setup(self) -> None:
        c = self.config
        self.cells = [_cell(c, c.d_model) for _ in range(c.num_layers)]
        self.dropout = Dropout(c.dropout_rate)
        if c.attention != "none":
            self.alignment = Alignment(c)
        if c.follows:  # W_c of Luong et al. 2015, eq. 5
            shape = c.encoder_dim + c.d_model, c.d_model
            self.combine = Linear(shape, ("embed", "state"), use_bias=False, dtype=c.dtype)
        elif c.readout == "maxout" and c.reads_context:
            shape = c.d_model + c.encoder_dim + c.embedding_dim, 2 * c.readout_dim
            self.maxout = Linear(shape, ("embed", "state"), dtype=c.dtype)

    def init_memory(self, h: Array, summary: Array) -> Memory:
        """What the steps share."""
        keys, values = (h, h[:, :, None]) if self.config.attention == "none" else self.alignment.project(h)
        return Memory(keys, values, summary)

    def __call__(self, state: State, y: Array, memory: Memory, valid: Array) -> tuple[State, Array, Array]:
        """y (B, E) → the next state, output (B, output_dim), weights (B, N, S).

        A memory of fewer rows, B / K, is shared: each of its rows by K neighbouring rows of y.

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
        if c.follows:
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
        """All layers' cells, dropout between them."""
        after = []
        for layer, (cell, carry) in enumerate(zip(self.cells, carries, strict=True)):
            carry, x = cell(carry, x if layer == 0 else self.dropout(x))
            after.append(carry)
        return tuple(after), x


class RecurrentSeq2Seq(nn.Module):
    """The encoder–decoder model; it is called, and decodes, as `Transformer` does.

    Differs: cells are flax's: GRU with the reset gate behind the recurrent product (as cuDNN), no peepholes; they
    compute in float32. Word vectors are scaled as the Transformer's. The summary is the encoder's last state itself,
    where Cho et al. have tanh(V h) and a first state tanh(V' c). The deep output of Bahdanau et al. sees s_t, as their
    equation 4 has it, not s_{t-1} as in their appendix; the default readout is one linear map of [s_t; c_t; y]. Luong
    et al. have a one-way encoder, which hands its states to the decoder; so has this where `bidirectional` is off.
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

    def __call__(
        self, source: Array, target: Array, source_valid: Array | None = None, target_valid: Array | None = None
    ) -> Array:
        """source ids (B, S), target ids (B, T) → logits (B, T, padded V) of the token after each, float32."""
        x, project = self.hidden(source, target, source_valid, target_valid)
        return project(x, self.config.target_vocab_size, self.config.dtype)

    def hidden(
        self,
        source: Array,
        target: Array,
        source_valid: Array | None = None,
        target_valid: Array | None = None,
        step: Array | int = 0,
    ) -> tuple[Array, Projection]:
        """What is projected to logits (B, T, output_dim), and what does that. Weights are sown, (B, N, T, S).

        `source_valid`: True at tokens, False at the padding behind them. A state sees what is before it, so that
        `target_valid` has nothing to do. In training, update `step`, as many positions of `target` as the config says
        are not read: there the model reads what it finds most probable itself (Bengio et al. 2015).

        Differs: one coin is flipped a position, for all rows together, where they flip one a word: the product with the
        vocabulary is skipped where no row needs it. Nothing forbids padding or the beginning, as decoding does.
        """
        valid = jnp.ones(source.shape, bool) if source_valid is None else source_valid
        cache = self.init_cache(source, valid, target.shape[1])
        given = None
        if self.has_rng("dropout") and self.config.reads_itself:
            rate = self.config.teacher_forcing_at(step)
            given = jax.random.bernoulli(self.make_rng("dropout"), rate, target.shape[1:]).at[0].set(True)
        x, weights, _ = self._run(cache, target, given)
        self.sow("intermediates", "weights", weights)
        return self.dropout(x), self.output.projection()

    def init_cache(self, source: Array, source_valid: Array, length: int) -> Cache:
        """Runs the encoder, once. `length`, which a Transformer needs, is free here."""
        c = self.config
        h, summary, carries = self.encoder(self.source_embedding(source), source_valid)
        fed = jnp.zeros((len(source), c.d_model)) if c.input_feeding else None
        return Cache(State(carries, fed), self.decoder.init_memory(h, summary), source_valid)

    def extend(self, cache: Cache, target: Array, position: Array | int) -> tuple[Array, Cache]:
        """target ids (B, T), which follow what the cache has seen → logits (B, T, padded V) and the cache with them."""
        x, _, past = self._run(cache, target, None)
        project = self.output.projection()
        return project(x, self.config.target_vocab_size, self.config.dtype), cache._replace(past=past)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """As `Transformer.attention_maps`: the alignment, in one layer; nothing without attention."""
        return (
            {("alignment", "target", "source"): sown["weights"][0][:, None]} if self.config.attention != "none" else {}
        )

    @nn.nowrap
    def for_extend(self, params: Any) -> Any:
        """The parameters as `extend` in a loop wants them."""
        return params

    def _run(self, cache: Cache, target: Array, given: Array | None) -> tuple[Array, Array, State]:
        """→ outputs (B, T, output_dim), weights (B, N, T, S), state. Where `given` (T,) is False, the input is what the
        model itself would have said."""
        c, project = self.config, self.output.projection()

        def word(model: RecurrentSeq2Seq, tokens: Array) -> Array:
            return model.dropout(model.target_embedding(tokens))

        def step(model: RecurrentSeq2Seq, before: tuple[State, Array], inputs: tuple) -> tuple[tuple, tuple]:
            (state, own), (y, coins) = before, inputs
            if coins is not None:
                y = jnp.where(coins[0], y, word(model, own[:, None])[:, 0])
            state, output, weights = model.decoder(state, y, cache.memory, cache.source_valid)
            if coins is not None:  # the most probable word, if the next step reads it

                def said(x: Array) -> Array:
                    return project(x[:, None], c.target_vocab_size, c.dtype)[:, 0].argmax(axis=-1).astype(own.dtype)

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
