"""Keep parts of a model as they are while the rest is trained."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Path of a subtree of the parameters, e.g. "bert/encoder" → None: all of it; k: the first k of its stacked layers.
Frozen = Mapping[str, int | None]


def hold(params: Any, frozen: Frozen) -> Any:
    """Return the parameters, with gradients stopped at the frozen ones."""

    def stop(leaf: jax.Array, layers: int | None) -> jax.Array:
        if layers is None:
            return jax.lax.stop_gradient(leaf)
        return jnp.concatenate([jax.lax.stop_gradient(leaf[:layers]), leaf[layers:]])

    return _on_frozen(stop, params, frozen)


def without_updates(updates: Any, frozen: Frozen) -> Any:
    """Return the updates, with zeros for the frozen parameters. Weight decay would change them without a gradient."""

    def clear(leaf: jax.Array, layers: int | None) -> jax.Array:
        return jnp.zeros_like(leaf) if layers is None else leaf.at[:layers].set(0)

    return _on_frozen(clear, updates, frozen)


def _on_frozen(change: Any, tree: Any, frozen: Frozen) -> Any:
    def of(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for prefix, layers in frozen.items():
            if f"{name}/".startswith(f"{prefix}/"):
                return change(leaf, layers)
        return leaf

    return jax.tree_util.tree_map_with_path(of, tree) if frozen else tree
