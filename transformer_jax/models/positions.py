"""Position encodings.

These are vectors added to embeddings, or relations between queries and keys in
attention. The pure functions come first, then the modules.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · H head
width · H' head width of values · k largest distance (longer ones are clipped to it) · R
= 2k + 1 clipped distances.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.models.checks import check_ids, exceeds
from transformer_jax.models.layers import make_initializer, parameter
from transformer_jax.models.numerics import product

Array = jax.Array

# act in attention, at any length; the others are added to embeddings
IN_ATTENTION = ("relative", "rotary")
POSITIONS = ("sinusoidal", "sinusoidal_halves", "learned", *IN_ATTENTION, "none")


def sinusoidal_positions(
    length: int, d_model: int, base: float = 10000.0, halves: bool = False
) -> np.ndarray:
    """Return the sinusoidal positions (length, d) in float32.

    PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d)).
    Vaswani et al. 2017, Section 3.5, with d = `d_model`. pos and i count from 0, so
    sines and cosines alternate. With an odd d, the last cosine is dropped. Computed in
    float64.

    With `halves`, all sines come first, then all cosines. This is the order in Hugging
    Face's Marian models.
    """
    pairs = np.arange((d_model + 1) // 2)
    angles = np.arange(length)[:, None] / base ** (2 * pairs / d_model)[None]
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, -1)
    waves = waves[:, :d_model].astype(np.float32)
    return np.concatenate([waves[:, 0::2], waves[:, 1::2]], axis=1) if halves else waves


def rotate(
    x: Array,
    position: Array | int = 0,
    room: int | None = None,
    base: float = 10000.0,
    beams: int = 1,
) -> Array:
    """Return R_m x_m for x (B, T, N, H) at positions m = position … position + T - 1.

    Su et al. 2021 (RoFormer), eqs. 15 and 34: each pair (x_2i-1, x_2i), i = 1 … H/2, is
    rotated by the angle m θ_i, θ_i = base^(-2(i-1)/H). The product of a query at m and
    a key at n then depends only on n - m (eq. 16). Sines and cosines come from
    `sinusoidal_positions`; the rotation is computed in float32. All positions must be
    below `room`, by default T. With `beams`, so many adjacent entries of x share a
    position, which are T / `beams` positions.

    Raises:
        ValueError: H is odd.
    """
    length, width = x.shape[1] // beams, x.shape[3]
    if width % 2:
        raise UserError(
            f"head width {width}: must be even to rotate pairs of features; "
            "change model.head_dim"
        )
    room = length if room is None else room
    waves = (
        jnp.asarray(sinusoidal_positions(room, width, base))
        if isinstance(room, int)
        else _waves(room, width, base)
    )
    waves = jax.lax.dynamic_slice_in_dim(waves, position, length)
    waves = jnp.repeat(waves, beams, axis=0)[None, :, None]
    sine, cosine = waves[..., 0::2], waves[..., 1::2]
    first, second = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return turned.reshape(x.shape).astype(x.dtype)


def _waves(length: Any, width: int, base: float) -> Array:
    """Return `sinusoidal_positions`, computed in float32.

    `length` is a symbol of `jax.export`.
    """
    frequencies = base ** (-np.arange(0, width, 2) / width)
    angles = (
        jnp.arange(length, dtype=jnp.float32)[:, None]
        * jnp.asarray(frequencies, jnp.float32)[None]
    )
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(length, width)


class Relations(NamedTuple):
    """Vectors of relative positions, and where the queries and keys are.

    These are w^K (R, H) and w^V (R, H') for the distances -k … k, the position of the
    first query, and the number of adjacent queries, and of adjacent keys, that share a
    position.
    """

    key: Array
    value: Array
    position: Array | int = 0
    beams: int = 1


def _to_keys(
    by_distance: Array, length: int, position: Array | int, beams: int
) -> Array:
    """Look up the value for each pair's distance: (B, N, T, R) → (B, N, T, S).

    The distance is clip(j - i, -k, k). Queries are at i = position … position + T - 1,
    keys at j = 0 … S - 1; S is `length`. With `beams`, so many adjacent queries and
    keys share a position.
    """
    queries, distances = by_distance.shape[2:]
    k = distances // 2
    index = (
        jnp.arange(length)[None] // beams
        - (position + jnp.arange(queries) // beams)[:, None]
    )
    index = (jnp.clip(index, -k, k) + k)[None, None]
    return jnp.take_along_axis(by_distance, index, axis=-1, mode="promise_in_bounds")


def relative_scores(
    query: Array,
    table: Array,
    length: int,
    position: Array | int = 0,
    dtype: str = "float32",
    beams: int = 1,
) -> Array:
    """Return x_i W_Q · a_ij^K / √d_k, (B, N, T, S), float32.

    This is the second term of eq. 5 in Shaw et al. 2018; a_ij^K is the w^K of distance
    clip(j - i, -k, k). query (B, T, N, H) is at positions i = position … position + T -
    1, keys are at j = 0 … S - 1, S is `length`, and table (2k + 1, H) holds w^K. With
    `beams`, so many adjacent queries and keys share a position.

    As in Section 3.3, the a_ij are never stored. Here, there is one product of the
    queries with the table.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    return _to_keys(
        product("BTNH,RH->BNTR", query, table, dtype), length, position, beams
    )


def relative_values(
    weights: Array,
    table: Array,
    position: Array | int = 0,
    dtype: str = "float32",
    beams: int = 1,
) -> Array:
    """Return Σ_j α_ij a_ij^V, (B, T, N, H').

    This is the second term of eq. 3 in Shaw et al. 2018; a_ij^V is the w^V of distance
    clip(j - i, -k, k). weights α (B, N, T, S); table (2k + 1, H') holds w^V.

    The weights at each distance are summed first; this is the transpose of looking up
    scores by distance. Then there is one product with the table, in `dtype`.
    """

    def look_up(by_distance: Array) -> Array:
        return _to_keys(by_distance, weights.shape[3], position, beams)

    shape = jax.ShapeDtypeStruct((*weights.shape[:3], table.shape[0]), weights.dtype)
    (by_distance,) = jax.linear_transpose(look_up, shape)(weights)
    return product("BNTR,RH->BTNH", by_distance, table, dtype)


class RelativePositions(nn.Module):
    """Tables w^K (2k + 1, head_dim) and w^V (2k + 1, value_dim).

    All heads share them (Shaw et al. 2018, Section 3.3). Their initialization is Xavier
    uniform; the paper does not specify one.

    Differs: The base model of Shaw et al. has separate tables for each head (Section
    4.1).
    """

    max_distance: int
    head_dim: int
    value_dim: int

    @nn.compact
    def __call__(self, position: Array | int = 0, beams: int = 1) -> Relations:
        def table(name: str, width: int) -> Array:
            shape, axes = (2 * self.max_distance + 1, width), ("distance", "head_dim")
            return parameter(self, name, nn.initializers.xavier_uniform(), shape, axes)

        return Relations(
            table("key_table", self.head_dim),
            table("value_table", self.value_dim),
            position,
            beams,
        )


class Positions(nn.Module):
    """Vectors (1, T, D) or (B, T, D) to add to embeddings.

    The positions are offset … offset + T - 1, or any. In the second case, `offset` has
    the position (B, T) of each token, e.g. counted anew in each document of a row.

    kind: "sinusoidal" (Vaswani et al. 2017, Section 3.5), "sinusoidal_halves" (the same
        features in another order, see `sinusoidal_positions`), "learned" (Gehring et
        al. 2017; row (E) of Table 3 in Vaswani et al. 2017) or "none". "relative" and
        "rotary" act in attention, so their vectors here are zeros.
    initializer: of learned positions, one of `layers.INITS`. "xavier_uniform" treats
        the table as one (max_length, d_model) matrix.

    Raises:
        ValueError: T exceeds `max_length`, unless `kind` is "relative" or "rotary". The
            caller must check offset + T, which is unknown under `jit`.
    """

    kind: str
    max_length: int
    d_model: int
    initializer: str = "normal"

    @nn.compact
    def __call__(self, length: int, offset: Array | int = 0) -> Array:
        last = length + offset if isinstance(offset, int) else length
        if self.kind not in IN_ATTENTION and exceeds(last, self.max_length):
            raise UserError(
                f"a sequence of {last} positions is longer than max_length = "
                f"{self.max_length}: cut the sequence or raise model.max_length"
            )
        if self.kind == "learned":
            shape = (self.max_length, self.d_model)
            table = parameter(
                self,
                "table",
                make_initializer(self.initializer),
                shape,
                ("position", "embed"),
            )
        elif self.kind in ("sinusoidal", "sinusoidal_halves"):
            halves = self.kind == "sinusoidal_halves"
            table = jnp.asarray(
                sinusoidal_positions(self.max_length, self.d_model, halves=halves)
            )
        else:
            return jnp.zeros((1, length, self.d_model))
        if jnp.ndim(offset) == 2:
            check_ids("positions", offset, self.max_length)
            return jnp.take(table, offset, axis=0)
        return jax.lax.dynamic_slice_in_dim(table, offset, length)[None]


def check_length(kind: str, length: int, max_length: int) -> None:
    """Raise ValueError if a cache of `length` positions exceeds `max_length`.

    Positions that act in attention have no such limit.
    """
    if kind not in IN_ATTENTION and exceeds(length, max_length):
        raise UserError(
            f"{length=}: must be at most max_length = {max_length}; "
            "ask for fewer positions or raise model.max_length"
        )
