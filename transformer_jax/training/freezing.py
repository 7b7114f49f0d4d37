"""Keep parts of a model as they are while the rest is trained."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Path of a subtree of the parameters, e.g. "bert/encoder" → None: all of it; k: the
# first k entries of its arrays along their first axis, e.g. the first k of stacked
# layers.
Parts = Mapping[str, int | None]


def part_of(name: str, parts: Parts) -> tuple[int | None, ...]:
    """Return what `parts` says of the parameter `name`, as a tuple of one; () if it
    says nothing.
    """
    return tuple(
        count for path, count in parts.items() if f"{name}/".startswith(f"{path}/")
    )[:1]


def hold(params: Any, frozen: Parts) -> Any:
    """Return the parameters, with gradients stopped at the frozen ones."""

    def stop(leaf: jax.Array, count: int | None) -> jax.Array:
        if count is None:
            return jax.lax.stop_gradient(leaf)
        return jnp.concatenate([jax.lax.stop_gradient(leaf[:count]), leaf[count:]])

    return _on_frozen(stop, params, frozen)


def without_updates(updates: Any, frozen: Parts) -> Any:
    """Return the updates, with zeros for the frozen parameters.

    Weight decay would change them without a gradient.
    """

    def clear(leaf: jax.Array, count: int | None) -> jax.Array:
        return jnp.zeros_like(leaf) if count is None else leaf.at[:count].set(0)

    return _on_frozen(clear, updates, frozen)


def _on_frozen(change: Any, tree: Any, frozen: Parts) -> Any:
    def of(path: Any, leaf: jax.Array) -> jax.Array:
        found = part_of(jax.tree_util.keystr(path, simple=True, separator="/"), frozen)
        return change(leaf, *found) if found else leaf

    return jax.tree_util.tree_map_with_path(of, tree) if frozen else tree
