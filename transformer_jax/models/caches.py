"""Caches: the state of decoding between steps.

`Cache` is that of an encoder–decoder. The other classes keep projected keys and values
of attention. They own their layout: a stack asks them where their positions are and
what a query may see, and hands them what to write.

Shapes: B rows · T new positions · S positions with room · K key-value heads · H head
width (d_k) · H' head width of values (d_v) · J hypotheses of a row.
"""

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import export

from transformer_jax.models.masks import CAUSAL, Mask, padding

Array = jax.Array


def repeat_rows(
    tree: Any,
    count: int,
) -> Any:
    """Return `tree` with every row of its leaves `count` times, next to each other."""

    def repeat(x: Array) -> Array:
        return jnp.repeat(x, count, axis=0)

    return jax.tree.map(repeat, tree)


def reorder_rows(
    tree: Any,
    parents: Array,
) -> Any:
    """Return `tree` with rows (B·J, …) in another order within each group of J.

    Row j of group b is the old row parents[b, j] of this group. `parents` is (B, J).
    Groups do not mix, so they may be on different devices.
    """

    def take(group: Array, rows: Array) -> Array:
        return group.at[rows].get(mode="promise_in_bounds")

    def reorder(x: Array) -> Array:
        groups = x.reshape(*parents.shape, *x.shape[1:])
        groups = jax.vmap(take)(groups, parents)
        return groups.reshape(x.shape)

    return jax.tree.map(reorder, tree)


# In a loop over steps, XLA for CPUs copies the cache of a single row at every step if
# its axis of rows is in the loop's state or takes part in an update. So `pack` removes
# this axis between steps, and `put` within a step.


def pack(cache: Any, rows: int) -> Any:
    """Return a cache of `rows` rows as the state of a loop."""
    return jax.tree.map(lambda x: x[0], cache) if rows == 1 else cache


def unpack(packed: Any, rows: int) -> Any:
    """Return the cache of which `pack` made `packed`."""
    return jax.tree.map(lambda x: x[None], packed) if rows == 1 else packed


def put(old: Array, new: Array, at: Array | int) -> Array:
    """Return `old` (B, K, S, H) with `new` (B, K, T, H) from entry `at` on."""
    update = jax.lax.dynamic_update_slice_in_dim
    new = new.astype(old.dtype)
    if old.shape[0] == 1:
        row = update(old[0], new[0], at, axis=1)
        return row[None]
    return update(old, new, at, axis=2)


class Cache(NamedTuple):
    """The state of an encoder–decoder between the steps of decoding.

    The rows are the first axis of every leaf.

    past: what the decoder has read, a row for each hypothesis. It has a method
        `reorder`.
    memory: what the decoder reads of the source, (B, …). The hypotheses of a row share
        it.
    """

    past: Any
    memory: Any

    def repeat(self, count: int) -> Self:
        """Return the cache with `count` hypotheses in the place of each one."""
        past = repeat_rows(self.past, count)
        return self._replace(past=past)

    def reorder(self, parents: Array) -> Self:
        """Return the cache in which hypotheses continue others.

        Hypothesis j of row b continues hypothesis parents[b, j]; `parents` is (B, J).
        """
        past = self.past.reorder(parents)
        return self._replace(past=past)


class KeyValue(NamedTuple):
    """Projected keys (B, K, S, H) and values (B, K, S, H') of one layer.

    The head axis comes before the position axis because the products that read a cache
    use this order. With any other order, every step would copy the cache.
    """

    key: Array
    value: Array

    @classmethod
    def of_heads(
        cls,
        key: Array,
        value: Array,
    ) -> "KeyValue":
        """Return a cache of keys (B, S, K, H) and values (B, S, K, H')."""
        return cls(jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))

    def heads(self) -> tuple[Array, Array]:
        """Return keys (B, S, K, H) and values (B, S, K, H')."""
        return (
            jnp.swapaxes(self.key, 1, 2),
            jnp.swapaxes(self.value, 1, 2),
        )

    @property
    def room(self) -> int:
        """S."""
        return self.key.shape[2]

    def write(
        self,
        new: "KeyValue",
        at: Array | int,
    ) -> "KeyValue":
        """Return the cache with the entries of `new` from entry `at` on."""
        return KeyValue(put(self.key, new.key, at), put(self.value, new.value, at))


class SelfAttentionCache(Protocol):
    """The keys and values of a stack's self-attention."""

    @property
    def layers(self) -> tuple[KeyValue, ...]:
        """The keys and values of each layer."""

    def arrange(self, x: Array) -> Array:
        """Return x (N, T, D), the new positions, with the rows of the cache first."""

    def advance(self, position: Array | int) -> Self:
        """Return the cache that is ready for entries at `position`."""

    def entry(self, position: Array | int) -> Array | int:
        """Return the entry at which what is at `position` is written."""

    def queries(
        self,
        position: Array | int,
        count: int,
    ) -> Array:
        """Return the positions of `count` new entries, the first of them `position`."""

    def keys(self) -> Array:
        """Return the position of each entry, (S,)."""

    def seen(
        self,
        position: Array | int,
        count: int,
        begins: Array | None,
    ) -> Mask:
        """Return what the `count` new entries may attend to.

        Positions before `begins` (B,) are padding.
        """

    def written(self, layers: tuple[KeyValue, ...]) -> Self:
        """Return the cache with these layers."""

    def reorder(self, parents: Array) -> Self:
        """Return the cache in which hypotheses continue others: see `Cache.reorder`."""


class Past(NamedTuple):
    """The cache of rows that are one sequence each. Entry s is at position s."""

    layers: tuple[KeyValue, ...]

    def arrange(self, x: Array) -> Array:
        return x

    def advance(self, position: Array | int) -> Self:
        return self

    def entry(self, position: Array | int) -> Array | int:
        return position

    def queries(
        self,
        position: Array | int,
        count: int,
    ) -> Array:
        return position + jnp.arange(count)

    def keys(self) -> Array:
        return jnp.arange(self.layers[0].room)

    def seen(
        self,
        position: Array | int,
        count: int,
        begins: Array | None,
    ) -> Mask:
        room = self.layers[0].room
        mask = CAUSAL
        if begins is not None:
            positions = jnp.arange(room)[None]
            mask &= padding(positions >= begins[:, None])
        allowed = mask.part(position, count, 0, room)
        return Mask(allowed=allowed)

    def written(self, layers: tuple[KeyValue, ...]) -> Self:
        return self._replace(layers=layers)

    def reorder(self, parents: Array) -> Self:
        return reorder_rows(self, parents)


class SharedPast(NamedTuple):
    """The cache of rows with J hypotheses each, of which some are continued and others
    given up after each step.

    A row keeps what all its hypotheses have written, and a mask says which of it
    belongs to which hypothesis. So a search reorders only masks in each step, and no
    keys or values. Entry t·J + j was written by hypothesis j at position t.

    layers: keys and values (B, K, T·J, H) of each layer.
    owned: (B, J, T·J), True at the entries that belong to a hypothesis: one at each
        position so far.
    """

    layers: tuple[KeyValue, ...]
    owned: Array

    def arrange(self, x: Array) -> Array:
        """Return x (B·J, 1, D) as (B, J, D)."""
        rows, hypotheses, _ = self.owned.shape
        return x.reshape(rows, hypotheses, x.shape[-1])

    def reorder(self, parents: Array) -> Self:
        index = parents[:, :, None]
        owned = jnp.take_along_axis(self.owned, index, axis=1)
        return self._replace(owned=owned)

    def advance(self, position: Array | int) -> Self:
        """Return the cache in which each hypothesis owns the entry it will write."""
        rows, hypotheses, _ = self.owned.shape
        each = jnp.eye(hypotheses, dtype=bool)
        new = jnp.broadcast_to(each, (rows, hypotheses, hypotheses))
        entry = self.entry(position)
        owned = jax.lax.dynamic_update_slice_in_dim(self.owned, new, entry, axis=2)
        return self._replace(owned=owned)

    def entry(self, position: Array | int) -> Array | int:
        return position * self.owned.shape[1]

    def queries(
        self,
        position: Array | int,
        count: int,
    ) -> Array:
        """Return `position` for each hypothesis; `count` is J."""
        return jnp.full(count, position)

    def keys(self) -> Array:
        entries = jnp.arange(self.layers[0].room)
        return entries // self.owned.shape[1]

    def seen(
        self,
        position: Array | int,
        count: int,
        begins: Array | None,
    ) -> Mask:
        return Mask(allowed=self.owned[:, None])

    def written(self, layers: tuple[KeyValue, ...]) -> Self:
        return self._replace(layers=layers)


for _kind in (Cache, KeyValue, Past, SharedPast):
    export.register_namedtuple_serialization(
        _kind, serialized_name=f"transformer_jax.{_kind.__name__}"
    )
