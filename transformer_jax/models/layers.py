"""Building blocks of every model.

These are linear maps, embeddings, feed-forward networks, dropout and residual
connections.

Shapes: B batch · T positions · D d_model · F d_ff · V vocabulary.

Dropout is active only if `apply` is given a "dropout" key. Use `model.apply(params,
..., rngs={"dropout": key})` for training and `model.apply(params, ...)` for evaluation.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from jax import export

from transformer_jax.errors import UserError
from transformer_jax.models.checks import check_ids, differ
from transformer_jax.models.kernels import bits, int8
from transformer_jax.models.kernels.int8 import Int8
from transformer_jax.models.kernels.placement import check_placement, named
from transformer_jax.models.kernels.products import (
    keep,
    linear,
    plus_bias,
    product,
    recomputed,
    round_stream,
)

Array = jax.Array

FORMULAS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "silu": nn.silu,
}
# ReLU stores a mask for the backward pass, which is smaller than its argument.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    name: formula if name == "relu" else recomputed(formula)
    for name, formula in FORMULAS.items()
}
NORMS = ("post", "pre")
FEED_FORWARDS = ("plain", "gated")
INITS = ("xavier_uniform", "normal", "truncated_normal", "fan_in", "standard_normal")
# The standard deviation of "normal" and "truncated_normal", as in BERT and GPT.
STDDEV = 0.02


def dropout(
    x: Array,
    rate: float,
    key: Array,
) -> Array:
    """Set each element to zero with probability `rate`.

    The others are scaled by 1 / (1 - rate). `rate` is rounded to a multiple of 2⁻³².

    Raises:
        ValueError: `rate` is not in [0, 1).
    """
    if not 0 <= rate < 1:
        raise UserError(f"{rate=}: must be in [0, 1); use 0 for no dropout")
    return bits.drop(x, rate, key, bits.indices(x.shape))


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014).

    Active only if `apply` is given a "dropout" key.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.rate == 0.0 or not self.has_rng("dropout"):
            return x
        return dropout(x, self.rate, self.make_rng("dropout"))


def make_initializer(
    name: str,
    inputs: Sequence[int] = (0,),
    outputs: Sequence[int] = (1,),
    stddev: float = STDDEV,
) -> Callable[..., Array]:
    """Return the initializer `name`, one of INITS.

    It is for a kernel with input axes `inputs` and output axes `outputs`.

    "xavier_uniform": Glorot and Bengio 2010. "normal": standard deviation `stddev`.
    "truncated_normal": the same distribution, truncated at two standard deviations, as
    in the code of BERT's authors. "fan_in": normal with variance 1 / inputs, and
    "standard_normal": with variance 1, for embeddings, as in the code of T5's authors.
    """
    if name == "normal":
        return nn.initializers.normal(stddev)
    if name == "standard_normal":
        return nn.initializers.normal(1.0)
    if name == "fan_in":
        return nn.initializers.variance_scaling(
            1.0, "fan_in", "normal", tuple(inputs), tuple(outputs)
        )
    if name == "truncated_normal":
        return nn.initializers.truncated_normal(stddev)
    return nn.initializers.variance_scaling(
        1.0, "fan_avg", "uniform", tuple(inputs), tuple(outputs)
    )


def parameter(
    module: nn.Module,
    name: str,
    init: Callable[..., Array],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> Array:
    """Create a float32 parameter with named axes.

    The names decide how it is sharded. Raises ScopeParamShapeError, as linen does, if
    the parameters that are applied have another shape here.
    """
    if module.has_variable("params", name):
        # `module.param` would trace the initializer once more, for its shape alone: a
        # seventh of the time that tracing a Transformer takes.
        value = nn.unbox(module.get_variable("params", name))
        if value.shape != shape:
            path = "/" + "/".join(module.path)
            raise ScopeParamShapeError(name, path, value.shape, shape)
    else:
        value = module.param(name, named(init, axes), shape, jnp.float32)
    # a weight in 8 bits has two arrays
    check_placement(f"parameter {name}", jax.tree.leaves(value)[0])
    return value


def constrain(x: Array, *axes: str) -> Array:
    """Constrain how x is sharded, by the names of its axes.

    Without a mesh or sharding rules, return x unchanged, and so if x is a weight in 8
    bits.
    """
    if isinstance(x, Int8):
        return x
    return nn.with_logical_constraint(x, axes)


class Linear(nn.Module):
    """y = x W + b, e.g. with the spec "BTD,DNH->BTNH" for the projection to heads.

    The kernel W has the shape `shape`, e.g. (D, N, H); a separate axis for heads allows
    them to be sharded. `axes` has a name for each of its axes. "..." in a spec stands
    for any number of axes. `initializer` is one of INITS; `init_scale` multiplies the
    initial kernel. Biases start at zero. The product is computed in `dtype`, and y is
    rounded to `output_dtype`.
    """

    spec: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    use_bias: bool = True
    dtype: str = "float32"
    initializer: str = "xavier_uniform"
    init_scale: float = 1.0
    output_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        num_inputs = self.num_inputs
        if any(map(differ, x.shape[-num_inputs:], self.shape)):
            raise UserError(
                f"input of shape {x.shape}: "
                f"its last axes must be {self.shape[:num_inputs]}"
            )
        kernel = parameter(self, "kernel", self._init, self.shape, self.axes)
        bias = None
        if self.use_bias:
            shape = self.shape[num_inputs:]
            axes = self.axes[num_inputs:]
            bias = parameter(self, "bias", nn.initializers.zeros, shape, axes)
        return linear(self.spec, x, kernel, bias, self.dtype, self.output_dtype)

    @property
    def num_inputs(self) -> int:
        """The number of axes of x that are summed over."""
        operands, output = self.spec.split("->")
        kernel = operands.split(",")[1]
        return sum(axis not in output for axis in kernel)

    @nn.nowrap
    def _init(self, *args: Any) -> Array:
        """Return the initial kernel."""
        inputs = range(self.num_inputs)
        outputs = range(self.num_inputs, len(self.shape))
        init = make_initializer(self.initializer, inputs, outputs)
        return self.init_scale * init(*args)


@recomputed
def layer_norm(
    x: Array,
    gain: Array,
    bias: Array,
    epsilon: float,
) -> Array:
    """Scale x (…, D) to zero mean and unit variance over D, then apply gain and bias.

    The result is float32.
    """
    x = x.astype(jnp.float32)
    mean = x.mean(axis=-1, keepdims=True)
    # E[x²] - E[x]² would be inexact if the mean is large.
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    mean, factor = keep((mean, jax.lax.rsqrt(variance + epsilon)))
    return (x - mean) * (factor * gain) + bias


@recomputed
def rms_norm(
    x: Array,
    gain: Array,
    epsilon: float,
) -> Array:
    """Scale x (…, D) to a root mean square of 1 over D, then multiply it by the gain.

    The result is float32.
    """
    x = x.astype(jnp.float32)
    mean_square = jnp.square(x).mean(axis=-1, keepdims=True)
    factor = keep(jax.lax.rsqrt(mean_square + epsilon))
    return x * (factor * gain)


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al. 2016) over D features.

    Zero mean and unit variance, then gain and bias. The result is float32. Differs: The
    paper has no ε. Here, `epsilon` is added to the variance.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        gain = _row(self, "scale", nn.initializers.ones, x)
        bias = _row(self, "bias", nn.initializers.zeros, x)
        return layer_norm(x, gain, bias, self.epsilon)


class RMSNorm(nn.Module):
    """Root mean square normalization over D features: x / √(mean(x²) + ε) · g.

    Zhang and Sennrich 2019, eq. 4. The result is float32. Differs: The paper has no ε.
    Here it is inside the root, as in Llama (Touvron et al. 2023).
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        gain = _row(self, "scale", nn.initializers.ones, x)
        return rms_norm(x, gain, self.epsilon)


def _row(
    module: nn.Module,
    name: str,
    init: Callable[..., Array],
    x: Array,
) -> Array:
    """Create a parameter (D,) for the features of x (…, D), with as many axes as x."""
    row = parameter(module, name, init, x.shape[-1:], ("embed",))
    return jnp.expand_dims(row, range(x.ndim - 1))


NORM_TYPES: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
}


class Residual(nn.Module):
    """Residual connection, dropout and norm around a sub-layer f.

    Only this class decides where the norm is.

    "post" (Vaswani et al. 2017, Section 5.4):  y = norm(x + dropout(f(x)))
    "pre" (Xiong et al. 2020):                  y = x + dropout(f(norm(x)))

    Use it as `y = residual.after(x, f(residual.before(x)))`. `norm_type` is one of
    NORM_TYPES. Sums and norms are computed in float32, and y is rounded to `dtype`.
    """

    norm: str
    dropout_rate: float
    epsilon: float
    norm_type: str = "layer_norm"
    dtype: str = "float32"

    def setup(self) -> None:
        self.normalize = NORM_TYPES[self.norm_type](self.epsilon, name=self.norm_type)
        self.dropout = Dropout(self.dropout_rate)

    def before(self, x: Array) -> Array:
        """Return what f reads: x with post-LN, norm(x) with pre-LN."""
        return self.normalize(x) if self.norm == "pre" else x

    def after(self, x: Array, y: Array) -> Array:
        """Return the output for the input x and y = f(`before(x)`)."""
        x = x.astype(jnp.float32) + self.dropout(y.astype(jnp.float32))
        x = round_stream(x, self.dtype)
        if self.norm == "post":
            x = self.normalize(x)
        return constrain(x.astype(self.dtype), "batch", "length", "features")


class FeedForward(nn.Module):
    """FFN(x) = activation(x W₁ + b₁) W₂ + b₂, (B, T, D) → (B, T, D).

    Vaswani et al. 2017, eq. 2, with ReLU. With `kind` "gated", FFN(x) = (activation(x
    W) ⊙ x V) W₂ (Shazeer 2020, eq. 6; with "silu", this is SwiGLU). The kernels are
    called "gate" (W), "inner" (W₁ or V) and "outer" (W₂). `init_scale` multiplies the
    initial W₂. Products and the result have the type `dtype`; the activation is
    computed in float32.

    Differs: `dropout_rate` applies to the F hidden units, where the papers have no
    dropout. Shazeer has no biases; here, `use_bias` adds them to all kernels.
    """

    d_model: int
    d_ff: int
    activation: str = "relu"
    dropout_rate: float = 0.0
    dtype: str = "float32"
    initializer: str = "xavier_uniform"
    kind: str = "plain"
    use_bias: bool = True
    init_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        options: dict[str, Any] = {
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "initializer": self.initializer,
            "output_dtype": self.dtype,
        }

        def inner(name: str) -> Array:
            shape = (self.d_model, self.d_ff)
            axes = ("embed", "mlp")
            h = Linear("BTD,DF->BTF", shape, axes, name=name, **options)(x)
            return constrain(h, "batch", "length", "mlp").astype(jnp.float32)

        if self.kind == "gated":
            formula = FORMULAS[self.activation]

            @recomputed
            def gated(
                gate: Array,
                linear: Array,
            ) -> Array:
                return formula(gate) * linear

            h = gated(inner("gate"), inner("inner"))
        else:
            h = ACTIVATIONS[self.activation](inner("inner"))
        h = Dropout(self.dropout_rate)(h)
        shape = (self.d_ff, self.d_model)
        options["init_scale"] = self.init_scale
        outer = Linear("BTF,FD->BTD", shape, ("mlp", "embed"), name="outer", **options)
        return outer(h)


class Embedding(nn.Module):
    """A table (V, D) that maps ids to vectors.

    If it is tied to the output layer, it also maps vectors to logits.

    `scale` multiplies the vectors, but not the logits, by √d_model (Vaswani et al.
    2017, Section 3.4). BERT and GPT do not scale. The table is padded to a multiple of
    `vocab_multiple` rows, so that it can be sharded; see `mask_padding`.

    `initializer` is one of INITS. With `scale`, "normal" has variance 1 / d_model, so
    that the scaled vectors have unit variance; without, it has standard deviation
    `stddev`. The variance is that of tensor2tensor, the authors' code; the paper does
    not specify the initialization.
    """

    vocab_size: int
    d_model: int
    vocab_multiple: int = 1
    initializer: str = "normal"
    scale: bool = True
    stddev: float = STDDEV

    def setup(self) -> None:
        def table_init(
            key: Array,
            shape: tuple[int, int],
            dtype: jnp.dtype,
        ) -> Array:
            init = make_initializer(self.initializer, stddev=self.stddev)
            if self.scale and self.initializer == "normal":
                init = nn.initializers.normal(self.d_model**-0.5)
            table = init(key, (self.vocab_size, self.d_model), dtype)
            return jnp.pad(table, ((0, shape[0] - self.vocab_size), (0, 0)))

        shape = (padded_vocab_size(self.vocab_size, self.vocab_multiple), self.d_model)
        self.table = parameter(self, "table", table_init, shape, ("vocab", "vector"))

    def __call__(self, ids: Array) -> Array:
        """Look up ids (B, T) → (B, T, D), float32.

        Raises:
            UserError: `ids` are not integers (B, T), or outside of `jax.jit`, not in
                [0, `vocab_size`).
        """
        check_ids("ids", ids, self.vocab_size)
        table = self._gathered()
        if isinstance(table, Int8):
            x = int8.rows(table, ids)
        else:
            x = jnp.take(table, ids, axis=0)
        if self.scale:
            x = x * self.d_model**0.5
        return constrain(x, "batch", "length", "features")

    def head(self, dtype: str = "float32", bias: Array | None = None) -> "Head":
        """Return the table as the map from vectors to logits. See `Head`."""
        return Head(self._gathered(), bias, self.vocab_size, dtype)

    def _gathered(self) -> Array:
        """Gather the rows that FSDP distributes.

        This is done once for the look-up, and once for all chunks of a loss.
        """
        return constrain(self.table, "logits", "vector")


class TokenVectors(NamedTuple):
    """The vectors that a model reads for tokens, see `Embedding`.

    key: the field of the model's config that has their width.
    width: their width.
    factor: the number that rows of the table are multiplied by when they are looked up.
    is_output: the table of the predicted tokens is also the output layer.
    """

    key: str
    width: int
    factor: float
    is_output: bool


class OutputLayer(nn.Module):
    """A map from vectors to logits with its own table, not tied to an embedding.

    The table is padded to a multiple of `vocab_multiple` rows. `initializer` is one of
    INITS. The product is computed in `dtype`.
    """

    vocab_size: int
    d_model: int
    vocab_multiple: int = 1
    use_bias: bool = False
    initializer: str = "xavier_uniform"
    dtype: str = "float32"

    def setup(self) -> None:
        rows = padded_vocab_size(self.vocab_size, self.vocab_multiple)
        init = make_initializer(self.initializer, inputs=(1,), outputs=(0,))
        self.table = parameter(
            self, "table", init, (rows, self.d_model), ("vocab", "embed")
        )
        self.bias = None
        if self.use_bias:
            zeros = nn.initializers.zeros
            self.bias = parameter(self, "bias", zeros, (rows,), ("vocab",))

    def head(self) -> "Head":
        """Return the map from vectors to logits."""
        table = constrain(self.table, "logits", "vector")
        return Head(table, self.bias, self.vocab_size, self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """A map from vectors x to logits x Eᵀ + b over a vocabulary.

    It is a pytree whose leaves are its parameters. So a loss can take it as an
    argument, and apply it to a part of the positions at a time.

    table: E (padded V, D).
    bias: b (padded V,), or None.
    vocab_size: V. Ids ≥ V pad the table; they have a probability of zero.
    dtype: the type in which the product is computed.
    """

    table: Array
    bias: Array | None
    vocab_size: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        """Map x (B, T, D) to float32 logits (B, T, padded V)."""
        logits = product("BTD,VD->BTV", x, self.table, self.dtype)
        if self.bias is not None:
            logits = plus_bias(logits, self.bias)
        return mask_padding(logits, self.vocab_size)


export.register_pytree_node_serialization(
    Head,
    serialized_name="transformer_jax.Head",
    serialize_auxdata=lambda fields: json.dumps(fields).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round `vocab_size` up to a multiple of `multiple`."""
    return -(-vocab_size // multiple) * multiple


def mask_padding(logits: Array, vocab_size: int) -> Array:
    """Give ids ≥ `vocab_size`, which pad the vocabulary, a probability of zero.

    The logits are (B, T, padded V).
    """
    if logits.shape[-1] == vocab_size:
        return logits
    real = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.expand_dims(real, (0, 1)), logits, jnp.finfo(logits.dtype).min)
