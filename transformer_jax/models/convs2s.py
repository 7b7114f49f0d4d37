"""ConvS2S (Gehring et al. 2017, "Convolutional Sequence to Sequence Learning").

Encoder and decoder are stacks of gated convolutions. Each layer of the decoder has an
attention of its own, which the authors call multi-step attention.

Sections and equations are those of the paper. Its h is the decoder's state, z the
encoder's output, e the embedding of the source with its positions, and g that of the
target.

Shapes: B batch · S source positions · T target positions · E embedding (f in the paper)
· D hidden units (d) · K kernel width (k) · V vocabulary · L decoder layers.
"""

from typing import Any, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export

from transformer_jax.models.attention import Valid, attention_weights, dot_scores
from transformer_jax.models.caches import Cache, reorder_rows
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.front_ends import Tokens
from transformer_jax.models.kernels.products import linear, product
from transformer_jax.models.layers import (
    Dropout,
    Embedding,
    Head,
    constrain,
    padded_vocab_size,
    parameter,
)
from transformer_jax.models.positions import Positions

Array = jax.Array

# The standard deviation of embeddings at the start (Section 3.5).
EMBEDDING_STDDEV = 0.1


class Memory(NamedTuple):
    """The encoded source.

    vectors: z (B, S, E), the output of the encoder, which attention compares.
    values: z + e (B, S, E), of which attention takes the weighted sum.
    valid: (B, S), True at the source and False at its padding.
    """

    vectors: Array
    values: Array
    valid: Array


class Past(NamedTuple):
    """The inputs of convolutions that the decoder keeps.

    inputs: for each layer, the last K - 1 inputs of its convolution (B, K - 1, D).
        Before the first position, they are zeros.
    """

    inputs: tuple[Array, ...]

    def reorder(self, parents: Array) -> Self:
        """See `Cache.reorder`."""
        return reorder_rows(self, parents)


for _kind in (Memory, Past):
    export.register_namedtuple_serialization(
        _kind, serialized_name=f"transformer_jax.convs2s.{_kind.__name__}"
    )


def windows(
    x: Array,
    width: int,
) -> Array:
    """Return [x_t; …; x_{t+K-1}] (B, T, K·D) for each t, where x is (B, T+K-1, D).

    K is `width`.
    """
    length = x.shape[1] - width + 1
    parts = [x[:, i : i + length] for i in range(width)]
    return jnp.concatenate(parts, axis=-1)


def residual(
    x: Array,
    y: Array,
) -> Array:
    """Return (x + y) √0.5, which has the variance of x and y (Section 3.4)."""
    total = (x + y) * 0.5**0.5
    return constrain(total, "batch", "length", "features")


def scale_gradient(
    x: Array,
    factor: float,
) -> Array:
    """Return x. Its gradient is multiplied by `factor`."""
    constant = jax.lax.stop_gradient(x)
    return constant + factor * (x - constant)


def layer_parameters(
    module: "Affine | Output",
    shape: tuple[int, int],
    axes: tuple[str, str],
    variance: float,
    output: int,
) -> tuple[Array, Array]:
    """Create the matrix W of a layer and its bias b.

    `shape` and `axes` are those of W. Its axis `output` numbers the outputs, the other
    one their n inputs. W starts as N(0, √(variance / n)), and b as zeros (Section 3.5).

    With weight normalization, W = g v / ‖v‖ for each output, and g starts as ‖v‖
    (Salimans and Kingma 2016, eq. 2).
    """
    inputs = 1 - output
    init = nn.initializers.variance_scaling(
        variance, "fan_in", "normal", in_axis=inputs, out_axis=output
    )
    zeros = nn.initializers.zeros
    bias = parameter(module, "bias", zeros, (shape[output],), (axes[output],))
    v = parameter(module, "kernel", init, shape, axes)
    if not module.config.weight_norm:
        return v, bias
    norm = jnp.sqrt(jnp.square(v).sum(axis=inputs))
    g = parameter(module, "scale", lambda *_: norm, norm.shape, (axes[output],))
    factor = jnp.expand_dims(g / norm, inputs)
    return factor * v, bias


class Affine(nn.Module):
    """x W + b. For `variance`, see `layer_parameters`."""

    config: ConvS2SConfig
    outputs: int
    variance: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = layer_parameters(
            self,
            shape=(x.shape[-1], self.outputs),
            axes=("embed", "channels"),
            variance=self.variance,
            output=1,
        )
        return linear("BTC,CD->BTD", x, kernel, bias, self.config.dtype)


class Output(nn.Module):
    """The map W_o x + b_o from the decoder's output to logits (Section 3.2)."""

    config: ConvS2SConfig

    @nn.compact
    def __call__(self) -> Head:
        c = self.config
        rows = padded_vocab_size(c.target_vocab_size, c.vocab_multiple)
        table, bias = layer_parameters(
            self,
            shape=(rows, c.embedding_dim),
            axes=("vocab", "embed"),
            variance=c.retained,
            output=0,
        )
        table = constrain(table, "logits", "vector")
        return Head(table, bias, c.target_vocab_size, c.dtype)


class GatedConvolution(nn.Module):
    """v(W [x_t; …; x_{t+K-1}] + b), where v([A B]) = A ⊗ σ(B) (Section 3.2).

    It maps inputs (B, T+K-1, D) to (B, T, D).
    """

    config: ConvS2SConfig
    width: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        affine = Affine(
            c,
            outputs=2 * c.d_model,
            variance=4 * c.retained,
            name="convolution",
        )
        y = affine(windows(x, self.width))
        return nn.glu(y)


class Encoder(nn.Module):
    """A stack of gated convolutions.

    It sees padding as zeros, like what is beyond both ends of the source.
    """

    config: ConvS2SConfig

    @nn.compact
    def __call__(
        self,
        e: Array,
        valid: Array,
    ) -> Memory:
        """Read e (B, S, E), of which `valid` (B, S) is the source.

        The gradient of z is divided by the number of attentions that read it, and that
        of e is not (Section 3.4).
        """
        c = self.config
        beyond = c.encoder_kernel_width // 2
        ends = ((0, 0), (beyond, beyond), (0, 0))
        x = Affine(c, c.d_model, c.retained, name="first")(e)
        for layer in range(c.num_encoder_layers):
            inputs = Dropout(c.dropout_rate)(x)
            inputs = jnp.where(valid[:, :, None], inputs, 0)
            inputs = jnp.pad(inputs, ends)
            convolution = GatedConvolution(
                c,
                c.encoder_kernel_width,
                name=f"block_{layer}",
            )
            x = residual(x, convolution(inputs))
        z = Affine(c, c.embedding_dim, name="last")(x)
        z = scale_gradient(z, 1 / c.num_decoder_layers)
        return Memory(z, z + e, valid)


class Attention(nn.Module):
    """Multi-step attention, in one layer of the decoder (Section 3.3).

    Differs: The sum of values has E features. A linear map to the D features of the
    state follows, as in the authors' code. The paper does not mention it.
    """

    config: ConvS2SConfig

    @nn.compact
    def __call__(
        self,
        h: Array,
        g: Array,
        memory: Memory,
    ) -> tuple[Array, Array]:
        """Attend from h (B, T, D) and g (B, T, E) → c (B, T, D), weights a (B, T, S).

        d = W_d h + b_d + g (eq. 1), a = softmax(d · z), and c = m √(1/m) Σ_j a_j (z_j +
        e_j) (eq. 2 and Section 3.4) for a source of m positions.

        The memory may have fewer rows, B / J. Then J adjacent rows of h share each row
        of the memory.
        """
        c = self.config
        d = Affine(c, c.embedding_dim, name="query")(h) + g
        shared = d.reshape(memory.valid.shape[0], -1, c.embedding_dim)
        scores = dot_scores(shared, memory.vectors, c.dtype)
        mask = memory.valid[:, None, None]
        a = attention_weights(scores[:, None], mask)[:, 0]
        m = memory.valid.sum(axis=1)
        scale = jnp.sqrt(m)[:, None, None]
        total = product("BTS,BSE->BTE", a, memory.values, c.dtype)
        context = (scale * total).reshape(g.shape)
        context = Affine(c, c.d_model, name="context")(context)
        return context, a.reshape(*g.shape[:2], -1)


class Decoder(nn.Module):
    """A stack of gated convolutions that see no later position, each with attention."""

    config: ConvS2SConfig

    @nn.compact
    def __call__(
        self,
        g: Array,
        past: Past,
        memory: Memory,
    ) -> tuple[Array, Past, Array]:
        """Read g (B, T, E) after `past` → outputs (B, T, E), past, weights.

        The weights are (B, L, T, S).
        """
        c = self.config
        x = Affine(c, c.d_model, c.retained, name="first")(g)
        new = []
        of_layers = []
        for layer in range(c.num_decoder_layers):
            inputs = Dropout(c.dropout_rate)(x)
            inputs = jnp.concatenate([past.inputs[layer], inputs], axis=1)
            new.append(inputs[:, x.shape[1] :])
            convolution = GatedConvolution(
                c,
                c.decoder_kernel_width,
                name=f"block_{layer}",
            )
            h = residual(x, convolution(inputs))
            attention = Attention(c, name=f"attention_{layer}")
            context, a = attention(h, g, memory)
            x = h + context
            of_layers.append(a)
        outputs = Affine(c, c.embedding_dim, name="last")(x)
        outputs = Dropout(c.dropout_rate)(outputs)
        return outputs, Past(tuple(new)), jnp.stack(of_layers, axis=1)

    @nn.nowrap
    def start(self, rows: int) -> Past:
        """Return what `rows` sequences without a token have read."""
        c = self.config
        zeros = jnp.zeros((rows, c.decoder_kernel_width - 1, c.d_model))
        return Past((zeros,) * c.num_decoder_layers)


class ConvS2S(nn.Module):
    """The convolutional encoder–decoder.

    `model.apply(params, source, target)` returns logits, as for `Transformer`. The
    other methods are those of `EncoderDecoder`.

    front_end: maps what the encoder reads to vectors (B, S, E), see `front_ends`. None:
        the source consists of tokens.

    Differs: All layers of a stack have the same width. In the paper's models for WMT
    2014, the upper ones are wider.

    The authors' code, fairseq, departs from the paper: it also multiplies d, z + e and
    h + c by √0.5, adds c before the input of the residual block, and divides the
    gradient of z by 2L.
    """

    config: ConvS2SConfig
    front_end: nn.Module | None = None

    def setup(self) -> None:
        c = self.config
        c.check()
        self.source_embedding = self._embedding(c.source_vocab_size)
        self.target_embedding = self._embedding(c.target_vocab_size)
        self.source_positions = self._positions()
        self.target_positions = self._positions()
        self.dropout = Dropout(c.dropout_rate)
        self.source = self.front_end or Tokens(
            self.source_embedding, self.source_positions, self.dropout
        )
        self.target = Tokens(self.target_embedding, self.target_positions)
        self.encoder = Encoder(c)
        self.decoder = Decoder(c)
        self.output = Output(c)

    def __call__(
        self,
        source: Array,
        target: Array,
        source_valid: Valid = None,
        target_valid: Valid = None,
    ) -> Array:
        """Map source ids (B, S) and target ids (B, T) to logits of the next token.

        The logits are float32 (B, T, padded V). `source_valid` (B, S) is True at tokens
        and False at padding, or None if there is no padding. For `target_valid` see
        `hidden`.
        """
        memory = self.encode(source, source_valid)
        return self.head()(self.hidden(memory, target, target_valid))

    def encode(
        self,
        inputs: Array,
        valid: Valid = None,
    ) -> Memory:
        """Encode the source, e.g. ids (B, S), of which `valid` (B, S) are tokens."""
        e, valid = self.source(inputs, valid)
        if valid is None:
            valid = jnp.ones(e.shape[:2], bool)
        return self.encoder(e, valid)

    def hidden(
        self,
        memory: Memory,
        target: Array,
        target_valid: Valid = None,
        step: Array | int = 0,
    ) -> Array:
        """Return the decoder's output (B, T, E) if it reads the ids `target` (B, T).

        `target_valid` is ignored, because an output depends only on earlier positions.
        The attention weights (B, L, 1, T, S) are sown as "weights" in the collection
        "intermediates".
        """
        cache = self.start(memory, target.shape[1])
        outputs, _, a = self._read(cache, target, 0)
        self.sow("intermediates", "weights", a[:, :, None])
        return outputs

    def head(self) -> Head:
        """Return the map from the decoder's output to logits."""
        return self.output()

    def start(
        self,
        memory: Memory,
        room: int,
        hypotheses: int = 1,
    ) -> Cache:
        """Return a cache with the memory, and zeros as the inputs of convolutions.

        Raises:
            ValueError: `room` exceeds `max_length`.
        """
        self.target.check_room(room)
        rows = memory.valid.shape[0] * hypotheses
        return Cache(self.decoder.start(rows), memory)

    def extend(
        self,
        cache: Cache,
        ids: Array,
        position: Array | int,
    ) -> tuple[Array, Cache]:
        """Read ids (B, T) from `position` on → logits (B, T, padded V), cache."""
        outputs, past, _ = self._read(cache, ids, position)
        return self.head()(outputs), cache._replace(past=past)

    @nn.nowrap
    def attention_maps(self, sown: Any) -> dict[tuple[str, str, str], Array]:
        """Return attention weights (B, L, 1, T, S): see `EncoderDecoder`."""
        return {("multi-step attention", "target", "source"): sown["weights"][0]}

    def _read(
        self,
        cache: Cache,
        ids: Array,
        position: Array | int,
    ) -> tuple[Array, Past, Array]:
        """Read target ids (B, T) from `position` on, see `Decoder`."""
        g = self.dropout(self.target.embed(ids, position))
        return self.decoder(g, cache.past, cache.memory)

    @nn.nowrap
    def _embedding(self, vocab_size: int) -> Embedding:
        c = self.config
        return Embedding(
            vocab_size,
            c.embedding_dim,
            c.vocab_multiple,
            scale=False,
            stddev=EMBEDDING_STDDEV,
        )

    @nn.nowrap
    def _positions(self) -> Positions:
        c = self.config
        return Positions(
            "learned",
            c.max_length,
            c.embedding_dim,
            stddev=EMBEDDING_STDDEV,
        )
