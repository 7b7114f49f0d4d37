"""Position encodings.

These are vectors added to embeddings, or relations between queries and keys in
attention. The pure functions come first, then the modules.

Shapes: B batch · T query positions · S key positions · D d_model · N heads · H head
width · H' head width of values · k largest distance (longer ones are clipped to it) · R
= 2k + 1 clipped distances.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.models.checks import check_ids, exceeds
from transformer_jax.models.kernels.products import product
from transformer_jax.models.layers import STDDEV, make_initializer, parameter

Array = jax.Array

# They act in attention, at any length. The others are added to embeddings.
IN_ATTENTION = ("relative", "relative_bias", "rotary")
POSITIONS = ("sinusoidal", "sinusoidal_halves", "learned", *IN_ATTENTION, "none")
# how "rotary" positions reach beyond the length of the training: see `Scaling`
SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn")


def sinusoidal_positions(
    length: int,
    d_model: int,
    base: float = 10000.0,
    halves: bool = False,
) -> np.ndarray:
    """Return the sinusoidal positions (length, d) in float32.

    PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d)).
    Vaswani et al. 2017, Section 3.5, with d = `d_model`. pos and i count from 0, so
    sines and cosines alternate. With an odd d, the last cosine is dropped. Computed in
    float64.

    With `halves`, all sines come first, then all cosines. This is the order in Hugging
    Face's Marian models.
    """
    return _sinusoids(np.arange(length), d_model, _periods(d_model, base), halves)


def _periods(width: int, base: float) -> np.ndarray:
    """Return base^(2i / width), the positions in which the angle of pair i grows by
    1.
    """
    pairs = np.arange((width + 1) // 2)
    return base ** (2 * pairs / width)


def _sinusoids(
    positions: np.ndarray,
    d_model: int,
    periods: np.ndarray,
    halves: bool = False,
) -> np.ndarray:
    """Return `sinusoidal_positions` at `positions` (T,): (T, d), float32."""
    angles = positions[:, None] / periods[None]
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    waves = waves.reshape(len(positions), -1)[:, :d_model].astype(np.float32)
    if halves:
        return np.concatenate([waves[:, 0::2], waves[:, 1::2]], axis=1)
    return waves


def grid_positions(
    rows: int,
    columns: int,
    d_model: int,
) -> np.ndarray:
    """Return sinusoidal positions of a grid in reading order, (rows · columns, d).

    The first half of the features is `sinusoidal_positions` of the row, the rest that
    of the column (Parmar et al. 2018, Section 3.1, "Image Transformer").
    """
    of_rows = sinusoidal_positions(rows, (d_model + 1) // 2)
    of_columns = sinusoidal_positions(columns, d_model // 2)
    of_rows = np.repeat(of_rows, columns, axis=0)
    of_columns = np.tile(of_columns, (rows, 1))
    return np.concatenate([of_rows, of_columns], axis=1)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The change of the angles of "rotary" positions for texts that are longer than
    those of the training.

    kind: one of SCALINGS. "none": they are not. "linear": all are divided by `factor`
        (Chen et al. 2023, "Extending Context Window …"). "dynamic": θ grows with the
        room beyond `length` (transformers; Peng et al. 2023, Appendix B.2). "yarn" and
        "llama3": fast pairs keep their angles, slow ones are divided by `factor`, and
        between them the two are mixed (Peng et al. 2023, "YaRN", Section 3.2; Llama
        3.1).
    length: positions of a text in the training before.
    slow, fast: turns within `length` at which mixing begins and ends.

    Differs: "dynamic" takes the room of a cache as the length of all texts in it; in
    transformers, θ changes while a text grows, and keys of earlier tokens keep theirs.
    """

    kind: str = "none"
    factor: float = 1.0
    length: int = 8192
    slow: float = 1.0
    fast: float = 4.0

    def periods(self, width: int, base: float, room: Any) -> np.ndarray:
        """Return the positions in which the angle of each pair grows by 1, (H/2,).

        Raises:
            ValueError: the kind is "dynamic", and `room` is a symbol.
        """
        if self.kind == "dynamic":
            if not isinstance(room, int):
                raise UserError(
                    "model.rotary_scaling = 'dynamic': depends on the length, which is "
                    "free in an exported program; export with fixed lengths"
                )
            stretch = self.factor * max(room / self.length, 1) - (self.factor - 1)
            return _periods(width, base * stretch ** (width / (width - 2)))
        periods = _periods(width, base)
        if self.kind == "none":
            return periods
        kept = np.zeros_like(periods)
        if self.kind == "llama3":
            turns = self.length / (2 * np.pi * periods)
            kept = np.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        elif self.kind == "yarn":
            kept = self._kept_by_yarn(width, base)
        return 1 / (kept / periods + (1 - kept) / (self.factor * periods))

    def _kept_by_yarn(self, width: int, base: float) -> np.ndarray:
        """Return how much each pair keeps of its angle, (H/2,).

        The authors' code mixes between whole pairs, linearly in their number.
        """

        def pair(turns: float) -> float:
            """Return the number of the pair that makes `turns` within `length`."""
            period = self.length / (2 * np.pi * turns)
            return width * np.log(period) / (2 * np.log(base))

        first = max(np.floor(pair(self.fast)), 0)
        last = min(np.ceil(pair(self.slow)), width - 1)
        pairs = np.arange(width // 2)
        return 1 - np.clip((pairs - first) / max(last - first, 0.001), 0, 1)

    @property
    def magnitude(self) -> float:
        """The factor of queries and keys (Peng et al. 2023, eq. 22)."""
        is_yarn = self.kind == "yarn" and self.factor > 1
        return 0.1 * np.log(self.factor) + 1 if is_yarn else 1.0


UNSCALED = Scaling()


def rotary_waves(
    positions: np.ndarray | Array,
    room: Any,
    width: int,
    base: float = 10000.0,
    scaling: Scaling = UNSCALED,
) -> Array:
    """Return the sines and cosines that `rotate` needs at `positions` (T,): (1, T, H).

    H is `width`. They are those of `sinusoidal_positions`, computed in float64, unless
    `room`, which is above all positions, is a symbol of `jax.export`. `scaling` changes
    their angles, and may multiply them by its magnitude.
    """
    periods = scaling.periods(width, base, room)
    if isinstance(positions, np.ndarray):
        waves = jnp.asarray(_sinusoids(positions, width, periods))
    elif isinstance(room, int):
        table = jnp.asarray(_sinusoids(np.arange(room), width, periods))
        waves = jnp.take(table, positions, axis=0, mode="clip")
    else:
        frequencies = jnp.asarray(1 / periods, jnp.float32)
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
        waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        waves = waves.reshape(-1, width)
    if scaling.magnitude != 1:
        waves = waves * scaling.magnitude
    return waves[None]


def rotate(
    x: Array,
    waves: Array,
) -> Array:
    """Return R_m x_m for x (B, T, N, H), where m are the positions of `waves`.

    Su et al. 2021 (RoFormer), eqs. 15 and 34: each pair (x_2i-1, x_2i), i = 1 … H/2, is
    rotated by the angle m θ_i, θ_i = base^(-2(i-1)/H). The product of a query at m and
    a key at n then depends only on n - m (eq. 16). `waves` (1, T, H) has sin(m θ_i) and
    cos(m θ_i), see `rotary_waves`. The rotation is computed in float32.

    Raises:
        ValueError: H is odd.
    """
    width = x.shape[3]
    if width % 2:
        raise UserError(
            f"head width {width}: must be even to rotate pairs of features; "
            "change model.head_dim"
        )
    waves = waves[:, :, None]
    sine = waves[..., 0::2]
    cosine = waves[..., 1::2]
    first = x[..., 0::2]
    second = x[..., 1::2]
    turned = jnp.stack(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return turned.reshape(x.shape).astype(x.dtype)


def clipped_distances(
    queries: Array,
    keys: Array,
    k: int,
) -> Array:
    """Return clip(j - i, -k, k) + k for query positions i and key positions j: (T, S).

    This is the row of a table (2k + 1, H) for each pair (Shaw et al. 2018, eq. 4).
    """
    return jnp.clip(keys[None] - queries[:, None], -k, k) + k


class Relations(NamedTuple):
    """Vectors of relative positions for each distance, and the distances.

    key: w^K (R, H).
    value: w^V (R, H').
    distances: (T, S), the row of a table for each query and key.
    """

    key: Array
    value: Array
    distances: Array


def _to_keys(
    by_distance: Array,
    distances: Array,
) -> Array:
    """Look up the value for each pair's distance: (B, N, T, R) → (B, N, T, S)."""
    index = distances[None, None]
    return jnp.take_along_axis(by_distance, index, axis=-1, mode="promise_in_bounds")


def relative_scores(
    query: Array,
    table: Array,
    distances: Array,
    dtype: str = "float32",
) -> Array:
    """Return x_i W_Q · a_ij^K / √d_k, (B, N, T, S), float32.

    This is the second term of eq. 5 in Shaw et al. 2018. query (B, T, N, H) is x W_Q.
    a_ij^K is the row distances[i, j] of table (R, H), which holds w^K.

    As in Section 3.3, the a_ij are never stored. Here, there is one product of the
    queries with the table.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    return _to_keys(product("BTNH,RH->BNTR", query, table, dtype), distances)


def relative_values(
    weights: Array,
    table: Array,
    distances: Array,
    dtype: str = "float32",
) -> Array:
    """Return Σ_j α_ij a_ij^V, (B, T, N, H').

    This is the second term of eq. 3 in Shaw et al. 2018. weights α (B, N, T, S). a_ij^V
    is the row distances[i, j] of table (R, H'), which holds w^V.

    The weights at each distance are summed first; this is the transpose of looking up
    scores by distance. Then there is one product with the table, in `dtype`.
    """

    def look_up(by_distance: Array) -> Array:
        return _to_keys(by_distance, distances)

    shape = jax.ShapeDtypeStruct((*weights.shape[:3], table.shape[0]), weights.dtype)
    (by_distance,) = jax.linear_transpose(look_up, shape)(weights)
    return product("BNTR,RH->BTNH", by_distance, table, dtype)


def buckets_of_distances(
    num_buckets: int,
    max_distance: int,
) -> np.ndarray:
    """Return the bucket of each distance 0 … `max_distance` to one side.

    Raffel et al. 2020, Section 2.1, and the authors' code: the first half of the
    buckets have one distance each. Those of the other half are ranges that grow by the
    same factor. The last one also has all distances beyond `max_distance`.
    """
    exact = num_buckets // 2
    distances = np.arange(max_distance + 1)
    # in float32, like the authors' code, which decides at the ends of ranges
    ratio = np.maximum(distances, exact).astype(np.float32) / np.float32(exact)
    growth = np.log(ratio) / np.float32(np.log(max_distance / exact))
    ranges = exact + (growth * (num_buckets - exact)).astype(np.int32)
    ranges = np.minimum(ranges, num_buckets - 1)
    return np.where(distances < exact, distances, ranges).astype(np.int32)


def relative_buckets(
    queries: Array,
    keys: Array,
    *,
    num_buckets: int,
    max_distance: int,
    causal: bool,
) -> Array:
    """Return the bucket of each query and key, (T, S), given their positions.

    queries (T,), keys (S,). Earlier keys have the buckets of `buckets_of_distances`.
    Later ones have the same buckets, if `causal`, as that of distance 0. Otherwise half
    of the `num_buckets` are for them.
    """
    distances = keys[None] - queries[:, None]
    offset: Array | int = 0
    if causal:
        distances = jnp.maximum(-distances, 0)
    else:
        num_buckets //= 2
        offset = jnp.where(distances > 0, num_buckets, 0)
        distances = jnp.abs(distances)
    buckets = jnp.asarray(buckets_of_distances(num_buckets, max_distance))
    return offset + buckets[jnp.minimum(distances, max_distance)]


class Places(NamedTuple):
    """Arrays that tell all layers of a stack about positions in self-attention.

    waves: (1, T, H), for "rotary" positions: see `rotate`.
    distances: (T, S), for "relative" positions: see `clipped_distances`.
    bias: (1, N, T, S), for "relative_bias" positions: see `RelativeBias`.
    """

    waves: Array | None = None
    distances: Array | None = None
    bias: Array | None = None


NOWHERE = Places()


def make_places(
    kind: str,
    queries: np.ndarray | Array,
    keys: np.ndarray | Array,
    room: Any,
    *,
    head_dim: int,
    rotary_base: float,
    max_distance: int,
    scaling: Scaling = UNSCALED,
) -> Places:
    """Return the `Places` of queries at positions (T,) and keys at positions (S,).

    kind: one of POSITIONS. Those that do not act in attention have no places. Those of
        "relative_bias" come from `RelativeBias`, which has parameters.
    room: is above all positions of queries.
    """
    if kind == "rotary":
        waves = rotary_waves(queries, room, head_dim, rotary_base, scaling)
        return Places(waves=waves)
    if kind == "relative":
        at = jnp.asarray(queries)
        to = jnp.asarray(keys)
        return Places(distances=clipped_distances(at, to, max_distance))
    return NOWHERE


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
    def __call__(self, distances: Array) -> Relations:
        def table(
            name: str,
            width: int,
        ) -> Array:
            shape = (2 * self.max_distance + 1, width)
            axes = ("distance", "head_dim")
            return parameter(self, name, nn.initializers.xavier_uniform(), shape, axes)

        return Relations(
            table("key_table", self.head_dim),
            table("value_table", self.value_dim),
            distances,
        )


class RelativeBias(nn.Module):
    """A scalar for each head and each bucket of distances, which is added to scores.

    Raffel et al. 2020 (T5), Section 2.1. All layers of a stack share the table
    (num_buckets, N). Its initial standard deviation is 1/√d_model, as in Hugging Face's
    transformers; the paper does not specify it.
    """

    num_heads: int
    num_buckets: int
    max_distance: int
    d_model: int

    @nn.compact
    def __call__(
        self,
        queries: np.ndarray | Array,
        keys: np.ndarray | Array,
        causal: bool,
    ) -> Array:
        """Return the bias (1, N, T, S) of queries at positions (T,) and keys at (S,).

        `causal`: no query sees a later key, so that all buckets are for earlier ones.
        """
        table = parameter(
            self,
            "table",
            nn.initializers.normal(self.d_model**-0.5),
            (self.num_buckets, self.num_heads),
            ("distance", "heads"),
        )
        buckets = relative_buckets(
            jnp.asarray(queries),
            jnp.asarray(keys),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            causal=causal,
        )
        return jnp.take(table.T, buckets, axis=1)[None]


class Positions(nn.Module):
    """Vectors (1, T, D) or (B, T, D) to add to embeddings.

    The positions are offset … offset + T - 1, or any. In the second case, `offset` has
    the position (B, T) of each token, e.g. counted anew in each document of a row.

    kind: "sinusoidal" (Vaswani et al. 2017, Section 3.5), "sinusoidal_halves" (the same
        features in another order, see `sinusoidal_positions`), "learned" (Gehring et
        al. 2017; row (E) of Table 3 in Vaswani et al. 2017) or "none". Those of
        IN_ATTENTION act there, so their vectors here are zeros.
    initializer: of learned positions, one of `layers.INITS`. "xavier_uniform" treats
        the table as one (max_length, d_model) matrix.
    stddev: see `layers.make_initializer`.

    Raises:
        ValueError: T exceeds `max_length`, unless `kind` acts in attention. The caller
            must check offset + T, which is unknown under `jit`.
    """

    kind: str
    max_length: int
    d_model: int
    initializer: str = "normal"
    stddev: float = STDDEV

    @nn.compact
    def __call__(
        self,
        length: int,
        offset: Array | int = 0,
    ) -> Array:
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
                make_initializer(self.initializer, stddev=self.stddev),
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


def check_length(
    kind: str,
    length: int,
    max_length: int,
) -> None:
    """Raise ValueError if a cache of `length` positions exceeds `max_length`.

    Positions that act in attention have no such limit.
    """
    if kind not in IN_ATTENTION and exceeds(length, max_length):
        raise UserError(
            f"{length=}: must be at most max_length = {max_length}; "
            "ask for fewer positions or raise model.max_length"
        )
