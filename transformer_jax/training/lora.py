"""LoRA (Hu et al. 2021): weights keep their values, and a change of low rank is
trained in their place.

    h = W x + (α / r) B A x    (Section 4.1, eq. 3)

W has d × k values, B d × r and A r × k. Models do not know LoRA: they are given the
parameters W + (α / r) B A, which are formed before each call. So a step holds one more
array of the size of each adapted weight, and another one for its gradient.

A kernel of ours maps its first axes to its last ones, so it is Wᵀ here: A has the shape
(inputs, r) and B (r, outputs). The axes before, e.g. those of stacked layers, number
independent weights.
"""

import dataclasses
import fnmatch
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from transformer_jax import fields
from transformer_jax.errors import UserError
from transformer_jax.training.freezing import part_with
from transformer_jax.training.matrices import Block, blocks

Params = Any
A = "lora_a"
B = "lora_b"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The weights that LoRA adapts.

    rank: r; 0: there is no LoRA, and all parameters are trained.
    alpha: α; the change of a weight is scaled by α / r.
    targets: names of weights: the ends of their paths, in which * stands for anything,
        e.g. "query" or "encoder/*/query".
    fully_trained: paths of further parameters that are trained as they are, e.g.
        "bert/pooler". New heads and new rows of tables are trained in any case.
    """

    rank: int = fields.parameters(0)
    alpha: float = fields.parameters(16.0)
    # as in most experiments of the paper, Section 5.1
    targets: tuple[str, ...] = fields.parameters(("query", "value"))
    fully_trained: tuple[str, ...] = fields.parameters(())

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, rule and remedy) for every invalid value."""
        if self.rank < 0:
            yield "rank", "must be at least 1, or 0 for no LoRA"
        if self.alpha <= 0:
            yield "alpha", "must be positive"
        if not self.targets:
            yield "targets", "must name weights, e.g. ('query', 'value')"


class Weight(NamedTuple):
    """A weight that is adapted.

    path: its path in the parameters, which ends in "/kernel".
    names, shape: its axes.
    block: the axes of its inputs and outputs.
    """

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    block: Block

    @property
    def module(self) -> str:
        """The path of its module, by which targets name it."""
        return self.path.removesuffix("/kernel")

    def factors(self, rank: int) -> dict[str, nn.LogicallyPartitioned]:
        """Return the shapes of A (…, inputs, r) and B (…, r, outputs) by path, boxed
        with the names of their axes.
        """
        first = self.block.rows[0]
        outputs = self.block.columns[0]

        def made(x: tuple, between: Any, start: int) -> tuple:
            return (*x[:first], between, *x[start:])

        shapes = {
            A: ((*self.shape[:outputs], rank), (*self.names[:outputs], "rank")),
            B: (made(self.shape, rank, outputs), made(self.names, "rank", outputs)),
        }
        return {
            f"{self.module}/{name}": nn.LogicallyPartitioned(
                jax.ShapeDtypeStruct(shape, jnp.float32), names
            )
            for name, (shape, names) in shapes.items()
        }

    def change(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the product of A and B, with the shape of the weight."""
        first = self.block.rows[0]
        contracted = ((a.ndim - 1,), (first,))
        numbered = (tuple(range(first)),) * 2
        return jax.lax.dot_general(
            a, b, (contracted, numbered), precision=jax.lax.Precision.HIGHEST
        )


class Whole(NamedTuple):
    """A training of all parameters of a model.

    model: their shapes, boxed with the names of their axes.
    """

    model: Params

    @property
    def trained(self) -> Params:
        """The boxed shapes of `TrainState.params`."""
        return self.model

    @property
    def base(self) -> Params | None:
        """The boxed shapes of `TrainState.base`."""
        return None

    def split(self, params: Params, key: jax.Array) -> tuple[Params, Params | None]:
        """Return what is trained and the base, given the parameters of a model."""
        return params, None

    def join(self, trained: Params, base: Params | None) -> Params:
        """Return the parameters of the model."""
        return trained


class LowRank(NamedTuple):
    """A training with LoRA.

    What is trained is a tree with A and B of each adapted weight in the place of the
    weight, and the parameters that are trained as they are. The base is the tree of the
    model's parameters as they were at the start.

    model: the shapes of a model's parameters, boxed with the names of their axes.
    weights: the adapted weights.
    config: the keys of LoRA.
    parts: path of each parameter that is trained as it is → its first entry along the
        first axis that is trained.
    """

    model: Params
    weights: Sequence[Weight]
    config: LoraConfig
    parts: Mapping[str, int]

    @property
    def trained(self) -> Params:
        """The boxed shapes of `TrainState.params`."""
        flat = traverse_util.flatten_dict(self.model, sep="/")
        shapes: dict[str, Any] = {}
        for weight in self.weights:
            shapes |= weight.factors(self.config.rank)
        for path, start in self.parts.items():
            shapes[path] = _without_first(flat[path], start)
        return traverse_util.unflatten_dict(shapes, sep="/")

    @property
    def base(self) -> Params | None:
        """The boxed shapes of `TrainState.base`."""
        return self.model

    def split(self, params: Params, key: jax.Array) -> tuple[Params, Params | None]:
        """Return what is trained and the base, given the parameters of a model.

        B is zero. A is Gaussian, of variance 1 / inputs: the paper gives no variance.
        Its values depend on the key and the name of the weight alone.
        """
        flat = traverse_util.flatten_dict(params, sep="/")
        trained = {path: flat[path][start:] for path, start in self.parts.items()}
        for weight in self.weights:
            for path, box in weight.factors(self.config.rank).items():
                shape = box.value.shape
                if path.endswith(B):
                    trained[path] = jnp.zeros(shape, jnp.float32)
                    continue
                of_weight = jax.random.fold_in(key, zlib.crc32(path.encode()))
                inputs = math.prod(weight.shape[axis] for axis in weight.block.rows)
                trained[path] = jax.random.normal(of_weight, shape) / inputs**0.5
        return traverse_util.unflatten_dict(trained, sep="/"), params

    def join(self, trained: Params, base: Params | None) -> Params:
        """Return the parameters of the model: W + (α / r) B A, and what is trained as
        it is.
        """
        merged = traverse_util.flatten_dict(base, sep="/")
        flat = traverse_util.flatten_dict(trained, sep="/")
        scale = self.config.alpha / self.config.rank
        for weight in self.weights:
            a = flat[f"{weight.module}/{A}"]
            b = flat[f"{weight.module}/{B}"]
            merged[weight.path] = merged[weight.path] + scale * weight.change(a, b)
        for path, start in self.parts.items():
            kept = merged[path][:start]
            merged[path] = jnp.concatenate([kept, flat[path]]) if start else flat[path]
        return traverse_util.unflatten_dict(merged, sep="/")


Form = Whole | LowRank
# of functions that train parameters without a model
ALL: Form = Whole(None)


def form_of(config: Any, boxed: Params) -> Form:
    """Return how a run trains the parameters of a model.

    `config` is the config of a task, and `boxed` are the shapes of the parameters,
    boxed with the names of their axes.

    Raises UserError if a target or a path of `config.lora` names nothing.
    """
    if not config.lora.rank:
        return Whole(boxed)
    weights = _targets(config.lora, _weights(boxed))
    parts: dict[str, int] = {}
    starts = config.whole_parts
    for path in traverse_util.flatten_dict(nn.unbox(boxed), sep="/"):
        part = part_with(path, starts)
        if part is not None:
            parts[path] = starts[part]
    for name in config.lora.fully_trained:
        if not any(part_with(path, {name: None}) for path in parts):
            raise UserError(
                f"config.lora.fully_trained: {name!r} is no path of parameters: "
                f"there are {', '.join(_modules(boxed))}, and what is inside of them"
            )
    for weight in weights:
        if weight.path in parts:
            raise UserError(
                f"config.lora: {weight.module} is both in targets and in what is "
                "trained as it is: leave it out of one of them"
            )
    return LowRank(boxed, weights, config.lora, parts)


def _weights(boxed: Params) -> list[Weight]:
    """Return the weights that can be adapted: kernels that map features to features."""
    flat = traverse_util.flatten_dict(boxed, sep="/")
    of_leaf = dict(zip(_leaf_paths(boxed), blocks(boxed), strict=True))
    return [
        Weight(path, tuple(box.names), box.value.shape, of_leaf[path])
        for path, box in flat.items()
        if path.endswith("/kernel")
        and of_leaf[path].is_matrix
        and not of_leaf[path].is_table
    ]


def _leaf_paths(boxed: Params) -> list[str]:
    """Return the paths of parameters in leaf order."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
    ]


def _modules(boxed: Params) -> list[str]:
    return sorted(nn.unbox(boxed))


def _targets(config: LoraConfig, weights: Sequence[Weight]) -> list[Weight]:
    """Return the weights that `config.targets` names."""
    chosen: list[Weight] = []
    for target in config.targets:
        named = [
            weight
            for weight in weights
            if fnmatch.fnmatchcase(f"/{weight.module}", f"*/{target}")
        ]
        if not named:
            names = dict.fromkeys(w.module.rpartition("/")[2] for w in weights)
            example = weights[0].module if weights else "encoder/query"
            raise UserError(
                f"config.lora.targets = {config.targets!r}: {target!r} matches no "
                f"weight: there are {', '.join(sorted(names))}; to choose some of one "
                f"name, write more of a path, e.g. {example!r}"
            )
        chosen += [weight for weight in named if weight not in chosen]
    return chosen


def _without_first(box: Any, count: int) -> Any:
    """Return the boxed shape of a parameter without the first entries of its first
    axis, which is then whole on every device.
    """
    if not count:
        return box
    shape = box.value
    rows, *others = shape.shape
    left = jax.ShapeDtypeStruct((rows - count, *others), shape.dtype)
    return nn.LogicallyPartitioned(left, (None, *box.names[1:]))
