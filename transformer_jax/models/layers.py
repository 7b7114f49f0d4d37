"""The parts that every model is made of: linear maps, embeddings, feed-forward, dropout, residuals.

Shapes: B batch · T positions · D d_model · F d_ff · V vocabulary.

Dropout acts when `apply` is given a "dropout" key, and only then:
`model.apply(params, ..., rngs={"dropout": key})` trains, `model.apply(params, ...)` evaluates.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Array = jax.Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "silu": nn.silu,
}
NORMS = ("post", "pre")
PRODUCT = "product"  # what rematerialisation calls the products with weights: policies do not see into `einsum`
EMBEDDING_INITS = ("normal", "xavier_uniform")


def dropout(x: Array, rate: float, key: Array) -> Array:
    """Zeroes every element with probability `rate` (to 2⁻³²) and scales the others by 1 / (1 - rate).

    Raises:
        ValueError: `rate` is not in [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"{rate=}: must be in [0, 1).")
    cut = round(rate * 2**32)
    if cut == 0:
        return x
    bits = jax.lax.platform_dependent(
        key, cpu=lambda key: hashed_bits(key, x.shape), default=lambda key: jax.random.bits(key, x.shape, jnp.uint32)
    )
    return jnp.where(bits >= jnp.uint32(cut), x * (2**32 / (2**32 - cut)), jnp.zeros_like(x))


def hashed_bits(key: Array, shape: tuple[int, ...]) -> Array:
    """Random uint32 of `shape` by hashing each element's index with two words drawn from the key.

    On a CPU jax's generators cost as much as a matrix product of this size; this costs about an addition. The index is
    the one in the whole array, so no mesh changes the bits. They repeat after 2³² elements. For dropout only: one round
    of a hash a word (Wellons 2018, "Prospecting for Hash Functions", lowbias32) passes the tests in
    tests/models/test_layers.py, and no more is claimed.
    """

    def mix(h: Array) -> Array:
        h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
        h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
        return h ^ (h >> 16)

    first, second = jax.random.bits(key, (2,), jnp.uint32)
    index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return mix(mix(index * jnp.uint32(0x9E3779B9) + first) ^ second)


class Dropout(nn.Module):
    """Srivastava et al. 2014. Active when the caller gives a "dropout" key."""

    rate: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.rate == 0.0 or not self.has_rng("dropout"):
            return x
        return dropout(x, self.rate, self.make_rng("dropout"))


def parameter(
    module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, ...], axes: tuple[str, ...]
) -> Array:
    """A float32 parameter with a name for each axis: that is what decides how it is sharded."""
    boxed: Any = nn.with_logical_partitioning(init, axes)
    return module.param(name, boxed, shape, jnp.float32)


def constrain(x: Array, *axes: str) -> Array:
    """x, with names for its axes that decide how it lies on a mesh; without one, or without rules, nothing is done."""
    return nn.with_logical_constraint(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(spec: str, a: Array, b: Array, dtype: str = "float32") -> Array:
    """A product of two arrays in `dtype`, accumulated in float32 and float32 out, forward and backward.

    Every index of an operand must stand in the other or in the output. Differs from autodiff of `jnp.einsum`:
    cotangents too are rounded to bfloat16, where that would multiply them in float32, at a fraction of the speed; and
    the factors of a gradient stand in the order that transposes least. The price: no forward-mode differentiation.
    What "float32" is on an accelerator, `jax_default_matmul_precision` decides: by default TF32 or bfloat16 passes.

    Raises:
        ValueError: sizes that do not fit.
    """
    (in_a, in_b), out = _indices(spec)
    batch = [i for i in in_a if i in in_b and i in out]
    summed = [i for i in in_a if i in in_b and i not in out]
    rows, columns = [i for i in in_a if i not in in_b], [i for i in in_b if i not in in_a]
    # Matrix products take their operands transposed or not, as they stand; in bfloat16, on CPU, the second alone.
    a_transposed = dtype == "float32" and [i for i in in_a if i not in batch] == summed + rows
    b_transposed = [i for i in in_b if i not in batch] == columns + summed
    sizes: dict[str, int] = {}
    if (len(in_a), len(in_b)) != (a.ndim, b.ndim) or any(
        sizes.setdefault(i, size) != size for i, size in zip(in_a + in_b, a.shape + b.shape, strict=True)
    ):
        raise ValueError(f"{spec} does not fit arrays of shapes {a.shape} and {b.shape}.")

    def matrices(x: Array, indices: str, *groups: list[str]) -> Array:
        x = x.astype(dtype).transpose([indices.index(i) for i in sum(groups, batch)])
        return x.reshape([sizes[i] for i in batch] + [math.prod(sizes[i] for i in group) for group in groups])

    a = matrices(a, in_a, summed, rows) if a_transposed else matrices(a, in_a, rows, summed)
    b = matrices(b, in_b, columns, summed) if b_transposed else matrices(b, in_b, summed, columns)
    if dtype != "float32":
        a, b = _as_it_stands(a, b)
    n = len(batch)
    sums = (n if a_transposed else n + 1,), (n + 1 if b_transposed else n,)
    pairs = tuple(range(n)), tuple(range(n))
    product = jax.lax.dot_general(a, b, (sums, pairs), preferred_element_type=jnp.float32)
    if dtype != "float32":
        (product,) = _as_it_stands(product)
    order = [*batch, *rows, *columns]
    return product.reshape([sizes[i] for i in order]).transpose([order.index(i) for i in out])


def _as_it_stands(*arrays: Array) -> tuple[Array, ...]:
    """Keeps XLA for CPU from making these transpositions part of a product, which it then refuses in bfloat16."""
    return jax.lax.platform_dependent(
        *arrays, cpu=lambda *arrays: jax.lax.optimization_barrier(arrays), default=lambda *arrays: arrays
    )


def _indices(spec: str) -> tuple[list[str], str]:
    operands, out = spec.split("->")
    return operands.split(","), out


def _einsum_forward(spec: str, a: Array, b: Array, dtype: str) -> tuple[Array, tuple]:
    like = jnp.zeros(0, a.dtype), jnp.zeros(0, b.dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    return einsum(spec, a, b, dtype), (a, b, *like)


def _einsum_backward(spec: str, dtype: str, saved: tuple, cotangent: Array) -> tuple[Array, Array]:
    a, b, like_a, like_b = saved
    (in_a, in_b), out = _indices(spec)
    da = einsum(f"{out},{in_b}->{in_a}", cotangent, b, dtype)
    if in_b[-1] in out:  # what lies last in b lies last in the product
        db = einsum(f"{in_a},{out}->{in_b}", a, cotangent, dtype)
    else:
        db = einsum(f"{out},{in_a}->{in_b}", cotangent, a, dtype)
    return da.astype(like_a.dtype), db.astype(like_b.dtype)


einsum.defvjp(_einsum_forward, _einsum_backward)


class Linear(nn.Module):
    """y = x W + b over the last `num_inputs` axes of x.

    The kernel keeps the shape it has in the equations, such as (D, N, H) for the projection to heads, and a
    name for each axis, so that the heads of one matrix can be sharded. Xavier uniform (Glorot and Bengio 2010).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    num_inputs: int = 1
    use_bias: bool = True
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        inputs, outputs = range(self.num_inputs), range(self.num_inputs, len(self.shape))
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", tuple(inputs), tuple(outputs))
        kernel = parameter(self, "kernel", init, self.shape, self.axes)
        rows, columns = "abcdefgh"[: x.ndim - self.num_inputs], "ijklmn"[: kernel.ndim]
        ins, outs = columns[: self.num_inputs], columns[self.num_inputs :]
        y = checkpoint_name(einsum(f"{rows}{ins},{columns}->{rows}{outs}", x, kernel, self.dtype), PRODUCT)
        if self.use_bias:
            shape, axes = self.shape[self.num_inputs :], self.axes[self.num_inputs :]
            bias = parameter(self, "bias", nn.initializers.zeros, shape, axes)
            y += jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))
        return y


def layer_norm(epsilon: float, name: str | None = None) -> nn.LayerNorm:
    """Ba et al. 2016: zero mean and unit variance over the D features of one position, then gain and bias."""
    return nn.LayerNorm(
        epsilon=epsilon,
        use_fast_variance=False,  # E[x²] - E[x]² loses digits where the mean is large
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)),
        name=name,
    )


class Residual(nn.Module):
    """What surrounds a sub-layer f. Where the norm stands is decided here and nowhere else.

    post (Vaswani et al. 2017, Section 5.4):  y = norm(x + dropout(f(x)))
    pre (Xiong et al. 2020):                  y = x + dropout(f(norm(x)))

    Used as `y = residual.after(x, f(residual.before(x)))`.
    """

    norm: str
    dropout_rate: float
    epsilon: float

    def setup(self) -> None:
        self.layer_norm = layer_norm(self.epsilon)
        self.dropout = Dropout(self.dropout_rate)

    def before(self, x: Array) -> Array:
        return self.layer_norm(x) if self.norm == "pre" else x

    def after(self, x: Array, y: Array) -> Array:
        x = x + self.dropout(y)
        return constrain(x if self.norm == "pre" else self.layer_norm(x), "batch", "length", "features")


def final_norm(norm: str, epsilon: float) -> Callable[[Array], Array]:
    """What follows the last layer: a pre-LN stack ends in a norm of its own, a post-LN stack has had it."""
    return layer_norm(epsilon, name="final_norm") if norm == "pre" else lambda x: x


class FeedForward(nn.Module):
    """FFN(x) = activation(x W₁ + b₁) W₂ + b₂, (B, T, D) → (B, T, D). Vaswani et al. 2017, eq. 2 (ReLU).

    `dropout_rate` acts on the F hidden units; the paper has none there.
    """

    d_model: int
    d_ff: int
    activation: str = "relu"
    dropout_rate: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = Linear((self.d_model, self.d_ff), ("embed", "mlp"), dtype=self.dtype, name="inner")(x)
        h = constrain(h, "batch", "length", "mlp")
        h = Dropout(self.dropout_rate)(ACTIVATIONS[self.activation](h))
        return Linear((self.d_ff, self.d_model), ("mlp", "embed"), dtype=self.dtype, name="outer")(h)


class Embedding(nn.Module):
    """A table (V, D) that turns ids into vectors and, when tied, vectors into logits.

    Vaswani et al. 2017, Section 3.4: the vectors are multiplied by √d_model, the logits are not.
    The table is padded to a multiple of `vocab_multiple` rows so that it can be sharded; see `mask_padding`.
    `initializer`: "normal" has variance 1 / d_model (tensor2tensor, the authors' code), so that the scaled vectors have
    unit variance; "xavier_uniform" is that of the (V, D) matrix. The paper names neither.
    """

    vocab_size: int
    d_model: int
    vocab_multiple: int = 1
    initializer: str = "normal"

    def setup(self) -> None:
        def table_init(key: Array, shape: tuple[int, int], dtype: jnp.dtype) -> Array:
            init = nn.initializers.xavier_uniform()
            if self.initializer == "normal":
                init = nn.initializers.normal(self.d_model**-0.5)
            table = init(key, (self.vocab_size, self.d_model), dtype)
            return jnp.pad(table, ((0, shape[0] - self.vocab_size), (0, 0)))

        shape = (padded_vocab_size(self.vocab_size, self.vocab_multiple), self.d_model)
        self.table = parameter(self, "table", table_init, shape, ("vocab", "vector"))

    def __call__(self, ids: Array) -> Array:
        """ids (B, T) → (B, T, D), float32."""
        return constrain(jnp.take(self._in_use(), ids, axis=0) * self.d_model**0.5, "batch", "length", "features")

    def projection(self) -> "Projection":
        """The table as what turns vectors into logits."""
        return Projection(self._in_use(), None)

    def _in_use(self) -> Array:
        """The rows that FSDP keeps apart are brought together here: once for the look-up, once for all of a loss's
        chunks."""
        return constrain(self.table, "logits", "vector")


class OutputLayer(nn.Module):
    """A projection to the vocabulary that shares nothing with an embedding."""

    d_model: int
    padded_vocab_size: int
    use_bias: bool

    def setup(self) -> None:
        shape = (self.padded_vocab_size, self.d_model)
        self.table = parameter(self, "table", nn.initializers.xavier_uniform(), shape, ("vocab", "embed"))
        self.bias = None
        if self.use_bias:
            self.bias = parameter(self, "bias", nn.initializers.zeros, shape[:1], ("vocab",))

    def projection(self) -> "Projection":
        return Projection(constrain(self.table, "logits", "vector"), self.bias)


class Projection(NamedTuple):
    """What turns vectors into logits: table (padded V, D), bias (padded V,) or None."""

    table: Array
    bias: Array | None

    def __call__(self, x: Array, vocab_size: int, dtype: str = "float32") -> Array:
        """x (B, T, D) → logits (B, T, padded V), float32, those of ids ≥ `vocab_size` masked."""
        logits = einsum("BTD,VD->BTV", x, self.table, dtype)
        return mask_padding(logits if self.bias is None else logits + self.bias[None, None], vocab_size)


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    return -(-vocab_size // multiple) * multiple


def mask_padding(logits: Array, vocab_size: int) -> Array:
    """Gives the padding rows of the vocabulary (ids ≥ `vocab_size`) a probability of zero."""
    if logits.shape[-1] == vocab_size:
        return logits
    real = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.expand_dims(real, (0, 1)), logits, jnp.finfo(logits.dtype).min)
