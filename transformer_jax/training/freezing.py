"""Keep parts of a model as they are while the rest is trained."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.progress import counted

# Path of a subtree of the parameters, e.g. "bert/encoder" → None: all of it; k: the
# first k entries of its arrays along their first axis, e.g. the first k of stacked
# layers.
Parts = Mapping[str, int | None]


def part_with(name: str, parts: Parts) -> str | None:
    """Return the first path in `parts` that holds the parameter `name`, or None."""
    for path in parts:
        if f"{name}/".startswith(f"{path}/"):
            return path
    return None


def size(params: Any) -> int:
    """Return the number of values of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def trained_size(params: Any, frozen: Parts) -> int:
    """Return the number of values of parameters that are not frozen."""
    held = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        part = part_with(name_of(path), frozen)
        if part is None:
            continue
        count = frozen[part]
        if count is None:
            held += leaf.size
        else:
            held += min(count, leaf.shape[0]) * math.prod(leaf.shape[1:])
    return size(params) - held


def in_words(params: Any, frozen: Parts, base: Any = None) -> str:
    """Return the number of parameters, and of those that are frozen, if any are.

    `base` are the parameters of the model if `params` are those of LoRA, see
    `lora.LowRank`.
    """
    if base is not None:
        trained = size(params)
        share = trained / size(base)
        return (
            f"{counted(size(base), 'parameter')} of the model; "
            f"LoRA trains {trained:,} ({100 * share:.2f} %)"
        )
    words = counted(size(params), "parameter")
    held = size(params) - trained_size(params, frozen)
    return f"{words}, of which {held:,} are frozen" if held else words


def name_of(path: Any) -> str:
    """Return the name of a parameter, e.g. "bert/norm/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def hold(params: Any, frozen: Parts) -> Any:
    """Return the parameters, with gradients stopped at the frozen ones."""

    def stop(leaf: jax.Array, count: int | None) -> jax.Array:
        if count is None:
            return jax.lax.stop_gradient(leaf)
        frozen_entries = jax.lax.stop_gradient(leaf[:count])
        return jnp.concatenate([frozen_entries, leaf[count:]])

    return _on_frozen(stop, params, frozen)


def without_updates(updates: Any, frozen: Parts) -> Any:
    """Return the updates, with zeros for the frozen parameters.

    Weight decay would change them without a gradient.
    """

    def clear(leaf: jax.Array, count: int | None) -> jax.Array:
        if count is None:
            return jnp.zeros_like(leaf)
        return leaf.at[:count].set(0)

    return _on_frozen(clear, updates, frozen)


def _on_frozen(change: Any, tree: Any, frozen: Parts) -> Any:
    """Return a tree of parameters with `change(leaf, count)` for each frozen leaf.

    `count` is the number of its frozen entries, see `Parts`.
    """
    if not frozen:
        return tree

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        part = part_with(name_of(path), frozen)
        return leaf if part is None else change(leaf, frozen[part])

    return jax.tree_util.tree_map_with_path(changed, tree)
