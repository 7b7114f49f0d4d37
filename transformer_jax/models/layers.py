"""Building blocks of every model.

These are linear maps, embeddings, feed-forward networks, dropout and residual
connections.

Shapes: B batch · T positions · D d_model · F d_ff · V vocabulary.

Dropout is active only if `apply` is given a "dropout" key. Use `model.apply(params,
..., rngs={"dropout": key})` for training and `model.apply(params, ...)` for evaluation.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.errors import UserError
from transformer_jax.models.checks import check_ids, check_mesh, differ
from transformer_jax.models.numerics import (
    GPUS,
    hashed_bits,
    indices,
    platform,
    plus_bias,
    product,
    stored,
)

Array = jax.Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "silu": nn.silu,
}
NORMS = ("post", "pre")
FEED_FORWARDS = ("plain", "gated")
INITS = ("xavier_uniform", "normal", "truncated_normal")
# standard deviation of "normal" and "truncated_normal", as in BERT and GPT
STDDEV = 0.02
# checkpoint name of products with weights, for rematerialisation policies
WEIGHT_PRODUCT = "weight_product"


def dropout(x: Array, rate: float, key: Array) -> Array:
    """Set each element to zero with probability `rate`.

    The others are scaled by 1 / (1 - rate). `rate` is rounded to a multiple of 2⁻³².

    Raises:
        ValueError: `rate` is not in [0, 1).
    """
    if not 0 <= rate < 1:
        raise UserError(f"{rate=}: must be in [0, 1); use 0 for no dropout")
    cut = round(rate * 2**32)
    if cut == 0:
        return x
    bits = hashed_bits(key, indices(x.shape))
    return jnp.where(
        bits >= jnp.uint32(cut), x * (2**32 / (2**32 - cut)), jnp.zeros_like(x)
    )


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
    name: str, inputs: Sequence[int] = (0,), outputs: Sequence[int] = (1,)
) -> Callable[..., Array]:
    """Return the initializer `name`, one of INITS.

    It is for a kernel with input axes `inputs` and output axes `outputs`.

    "xavier_uniform": Glorot and Bengio 2010. "normal": standard deviation 0.02.
    "truncated_normal": the same distribution, truncated at two standard deviations, as
    in the code of BERT's authors.
    """
    if name == "normal":
        return nn.initializers.normal(STDDEV)
    if name == "truncated_normal":
        return nn.initializers.truncated_normal(STDDEV)
    return nn.initializers.variance_scaling(
        1.0, "fan_avg", "uniform", tuple(inputs), tuple(outputs)
    )


class Named(nn.LogicallyPartitioned):
    """A box that holds a parameter and the names of its axes.

    `nn.unbox` takes the parameter out.

    Linen maps the names to a mesh with `nn.logical_axis_rules`. NNX would take them for
    axes of a mesh that must be in scope. Here, `flax.nnx.bridge.ToNNX` shards the
    parameter as linen does: not at all without a mesh.
    """

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Return the arguments of the `nnx.Variable` that takes this box's place."""
        names = {
            "out_sharding": self.names,
            "sharding_rules": self.rules,
            "mesh": self.mesh,
        }
        return {"value": self.unbox(), "eager_sharding": False, **names}


export.register_pytree_node_serialization(
    Named,
    serialized_name="transformer_jax.Named",
    # the names; mesh and rules are always None
    serialize_auxdata=lambda fields: json.dumps(fields[0]).encode(),
    deserialize_auxdata=lambda data: (tuple(json.loads(data)), None, None),
)


def named(init: Callable[..., Array], axes: tuple[str, ...]) -> Callable[..., Any]:
    """Return the initializer `init` with its result in a `Named` box.

    `axes` has a name for each axis.
    """
    return lambda *args: Named(init(*args), axes)


def parameter(
    module: nn.Module,
    name: str,
    init: Callable[..., Array],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> Array:
    """Create a float32 parameter with named axes.

    The names decide how it is sharded.
    """
    value = module.param(name, named(init, axes), shape, jnp.float32)
    check_mesh(f"parameter {name}", value)
    return value


def constrain(x: Array, *axes: str) -> Array:
    """Constrain how x is sharded, by the names of its axes.

    Without a mesh or sharding rules, return x unchanged.
    """
    return nn.with_logical_constraint(x, axes)


class Linear(nn.Module):
    """y = x W + b over the last `num_inputs` axes of x.

    The kernel has the shape `shape`, e.g. (D, N, H) for the projection to heads; a
    separate axis for heads allows them to be sharded. `axes` has a name for each axis
    of the kernel. `initializer` is one of INITS; `init_scale` multiplies the initial
    kernel. Biases start at zero. Products are computed in `dtype`; sums are float32,
    except those over devices (see `product`), and the result is rounded to
    `output_dtype`. On accelerators, it is rounded before and after the bias is added.
    On GPUs, the gradient of x is rounded to `dtype`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    num_inputs: int = 1
    use_bias: bool = True
    dtype: str = "float32"
    initializer: str = "xavier_uniform"
    init_scale: float = 1.0
    output_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        inputs, outputs = (
            range(self.num_inputs),
            range(self.num_inputs, len(self.shape)),
        )
        if any(map(differ, x.shape[-self.num_inputs :], self.shape)):
            raise UserError(
                f"input of shape {x.shape}: "
                f"its last axes must be {self.shape[: self.num_inputs]}"
            )
        init = make_initializer(self.initializer, inputs, outputs)
        kernel = parameter(
            self,
            "kernel",
            lambda *args: self.init_scale * init(*args),
            self.shape,
            self.axes,
        )
        rows, columns = "abcdefgh"[: x.ndim - self.num_inputs], "ijklmn"[: kernel.ndim]
        ins, outs = columns[: self.num_inputs], columns[self.num_inputs :]
        if platform() in GPUS:
            # The product rounds x anyway. This rounds the gradient of x, too, so that
            # less is written to memory. For TPUs, it lowers the bound of a step, but
            # raises the compiler's estimate.
            x = x.astype(self.dtype)
        spec = f"{rows}{ins},{columns}->{rows}{outs}"
        y = product(spec, x, kernel, self.dtype, output_dtype=stored(self.output_dtype))
        if self.use_bias:
            shape, axes = self.shape[self.num_inputs :], self.axes[self.num_inputs :]
            bias = parameter(self, "bias", nn.initializers.zeros, shape, axes)
            y = plus_bias(y, bias)
        return checkpoint_name(y.astype(self.output_dtype), WEIGHT_PRODUCT)


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al. 2016) over D features.

    Zero mean and unit variance, then gain and bias. The result is float32. Differs: The
    paper has no ε. Here, `epsilon` is added to the variance.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        gain, bias = (
            _row(self, "scale", nn.initializers.ones, x),
            _row(self, "bias", nn.initializers.zeros, x),
        )
        x = x.astype(jnp.float32)
        mean = x.mean(axis=-1, keepdims=True)
        # not E[x²] - E[x]²: inexact if the mean is large
        variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
        mean, factor = _written((mean, jax.lax.rsqrt(variance + self.epsilon)))
        return (x - mean) * (factor * gain) + bias


class RMSNorm(nn.Module):
    """Root mean square normalization over D features: x / √(mean(x²) + ε) · g.

    Zhang and Sennrich 2019, eq. 4. The result is float32. Differs: The paper has no ε.
    Here it is inside the root, as in Llama (Touvron et al. 2023).
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        gain = _row(self, "scale", nn.initializers.ones, x)
        x = x.astype(jnp.float32)
        factor = _written(
            jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + self.epsilon)
        )
        return x * (factor * gain)


def _row(module: nn.Module, name: str, init: Callable[..., Array], x: Array) -> Array:
    """Create a parameter (D,) for the features of x (…, D), with as many axes as x."""
    return jnp.expand_dims(
        parameter(module, name, init, x.shape[-1:], ("embed",)), range(x.ndim - 1)
    )


def _written(statistics: Any) -> Any:
    """Make accelerators keep the statistics of each position for the backward pass.

    Otherwise, XLA on GPUs computes them again for the gradient of the gain. The kernel
    that does so also writes every addend of that gradient to memory, in float32. On
    TPUs, this makes no difference.
    """
    return (
        statistics if platform() == "cpu" else jax.lax.optimization_barrier(statistics)
    )


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
    NORM_TYPES. Sums and norms are computed in float32, and y is rounded to `dtype`. On
    accelerators, the sum is rounded before the norm, too.
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
        return self.normalize(x) if self.norm == "pre" else x

    def after(self, x: Array, y: Array) -> Array:
        x = x.astype(jnp.float32) + self.dropout(y.astype(jnp.float32))
        # on CPUs, this would take longer
        if self.dtype != "float32" and platform() != "cpu":
            # or XLA stores float32 for the backward pass
            x = jax.lax.optimization_barrier(x.astype(self.dtype))
        x = x if self.norm == "pre" else self.normalize(x)
        return constrain(x.astype(self.dtype), "batch", "length", "features")


def final_norm(
    norm: str, epsilon: float, norm_type: str = "layer_norm"
) -> Callable[[Array], Array]:
    """Return what follows the last layer of a stack.

    This is a norm of type `norm_type` for pre-LN, the identity for post-LN. The last
    layer of a post-LN stack already ends in a norm.
    """
    return (
        NORM_TYPES[norm_type](epsilon, name="final_norm")
        if norm == "pre"
        else lambda x: x
    )


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

        def hidden(name: str) -> Array:
            h = Linear(
                (self.d_model, self.d_ff), ("embed", "mlp"), name=name, **options
            )(x)
            return constrain(h, "batch", "length", "mlp").astype(jnp.float32)

        activation = ACTIVATIONS[self.activation]
        h = (
            activation(hidden("gate")) * hidden("inner")
            if self.kind == "gated"
            else activation(hidden("inner"))
        )
        shape, axes = (self.d_ff, self.d_model), ("mlp", "embed")
        outer = Linear(shape, axes, init_scale=self.init_scale, name="outer", **options)
        return outer(Dropout(self.dropout_rate)(h))


class Embedding(nn.Module):
    """A table (V, D) that maps ids to vectors.

    If it is tied to the output layer, it also maps vectors to logits.

    `scale` multiplies the vectors, but not the logits, by √d_model (Vaswani et al.
    2017, Section 3.4). BERT and GPT do not scale. The table is padded to a multiple of
    `vocab_multiple` rows, so that it can be sharded; see `mask_padding`.

    `initializer` is one of INITS. With `scale`, "normal" has variance 1 / d_model, so
    that the scaled vectors have unit variance; without, it has standard deviation 0.02.
    The variance is that of tensor2tensor, the authors' code; the paper does not specify
    the initialization.
    """

    vocab_size: int
    d_model: int
    vocab_multiple: int = 1
    initializer: str = "normal"
    scale: bool = True

    def setup(self) -> None:
        def table_init(key: Array, shape: tuple[int, int], dtype: jnp.dtype) -> Array:
            init = make_initializer(self.initializer)
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
        x = jnp.take(self._gathered(), ids, axis=0)
        return constrain(
            x * self.d_model**0.5 if self.scale else x, "batch", "length", "features"
        )

    def lm_head(self) -> "LMHead":
        """Return the table as the map from vectors to logits."""
        return LMHead(self._gathered(), None)

    def _gathered(self) -> Array:
        """Gather the rows that FSDP distributes.

        This is done once for the look-up, and once for all chunks of a loss.
        """
        return constrain(self.table, "logits", "vector")


class OutputLayer(nn.Module):
    """A map from vectors to logits with its own table, not tied to an embedding.

    `initializer` is one of INITS.
    """

    d_model: int
    padded_vocab_size: int
    use_bias: bool
    initializer: str = "xavier_uniform"

    def setup(self) -> None:
        shape = (self.padded_vocab_size, self.d_model)
        self.table = parameter(
            self, "table", make_initializer(self.initializer), shape, ("vocab", "embed")
        )
        self.bias = None
        if self.use_bias:
            self.bias = parameter(
                self, "bias", nn.initializers.zeros, shape[:1], ("vocab",)
            )

    def lm_head(self) -> "LMHead":
        return LMHead(constrain(self.table, "logits", "vector"), self.bias)


class LMHead(NamedTuple):
    """A map from vectors to logits: table (padded V, D), bias (padded V,) or None."""

    table: Array
    bias: Array | None

    def __call__(self, x: Array, vocab_size: int, dtype: str = "float32") -> Array:
        """Map x (B, T, D) to float32 logits (B, T, padded V).

        Ids ≥ `vocab_size` are masked.
        """
        logits = product("BTD,VD->BTV", x, self.table, dtype)
        return mask_padding(
            logits if self.bias is None else plus_bias(logits, self.bias), vocab_size
        )


export.register_namedtuple_serialization(
    LMHead, serialized_name="transformer_jax.LMHead"
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
