"""Names for the activations of a Flax model, to capture or replace them.

The pages of models/ know nothing of this. While a function is traced, Flax calls
`_Namer` around each method of each module, and the namer marks what the method returns
in the jaxpr. `Program` then evaluates the jaxpr one equation after the other, and loops
one iteration after the other. So a name also reaches one layer of a stack whose layers
are a loop. As no equations are compiled together, results do not depend on what is
captured or replaced, not even in the last bit.

A name is the path of a module, e.g. "decoder/layers/3/feed_forward":

- "layers/3" is layer 3, counted from 0, of a `models.stack.Stack`.
- What a method other than `__call__` returns has its name at the end.
- If a method returns several arrays, their fields or numbers follow.
- "/input" at the end is the first argument: what this module alone reads.
- "#2" at the end is the second time that a name occurs.

Activations of a loop over positions have the positions on axis 1, after the rows.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.errors import UserError
from transformer_jax.models.layers import Head

MARK = "activation "
EVERY_LAYER = ("layers", "*")  # of a `Stack`, whose attribute `layers` is the block

# of an activation: an array, or a function
Replacement = jax.Array | Callable[..., jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Found:
    """An activation.

    value: the array, with rows first.
    stepwise: True if a loop over positions computes it.
    """

    value: jax.Array
    stepwise: bool = dataclasses.field(metadata={"static": True})


class Program:
    """A function of arrays that calls Flax modules, traced for given shapes.

    arguments: pytrees of arrays, or of their shapes.
    """

    def __init__(self, function: Callable, *arguments: Any):
        def traced(*given: Any) -> Any:  # new, because JAX keeps traces of functions
            with nn.intercept_methods(_Namer()):
                return function(*given)

        outputs: Any
        self._program, outputs = jax.make_jaxpr(traced, return_shape=True)(*arguments)
        self._outputs = jax.tree.structure(outputs)

    def run(
        self,
        arguments: Sequence[Any],
        names: Collection[str] | None = (),
        replacements: Mapping[str, Replacement] | None = None,
        whole_loops: bool = False,
    ) -> tuple[Any, dict[str, Found]]:
        """Return what the function returns, and named activations.

        Args:
            arguments: pytrees of arrays.
            names: the activations to return. None: all, in the order of computation.
            replacements: name → an array of the same shape, or a function from the
                activation to it. The function of a stepwise activation is given that of
                one position, without axis 1, and the number of the position.
            whole_loops: True: loops without any of these names remain loops. This is
                faster to compile, and rounds differently.

        Raises:
            UserError: the result of a function has another shape than its argument.
        """
        walk = _Walk(names, replacements or {}, whole_loops)
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(tuple(arguments))]
        outputs = walk.through(self._program.jaxpr, self._program.consts, leaves)
        return jax.tree.unflatten(self._outputs, outputs), walk.found()


class _Namer:
    """Marks what methods of modules read and return, see `nn.intercept_methods`."""

    def __init__(self) -> None:
        # of the modules whose methods are running: what precedes its path, and itself
        self._running: list[tuple[tuple[str, ...], nn.Module]] = []

    def __call__(
        self,
        call: Callable,
        arguments: tuple,
        keywords: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module = context.module
        method = context.method_name
        if module.scope is None or method == "setup":
            return call(*arguments, **keywords)
        before = self._before(module)
        last = _public(module, method)
        name = "" if last is None else "/".join((*before, *module.path, *last))
        if name and arguments and _is_activation(arguments[0]):
            read = checkpoint_name(arguments[0], f"{MARK}{name}/input")
            arguments = (read, *arguments[1:])
        self._running.append((before, module))
        try:
            output = call(*arguments, **keywords)
        finally:
            self._running.pop()
        if not name or (arguments and output is arguments[0]):
            return output
        return _marked(name, output, module)

    def _before(self, module: nn.Module) -> tuple[str, ...]:
        """Return what precedes the path of a module.

        `Stack` binds its block to the parameters of each layer, as a module without a
        parent.
        """
        if not self._running:
            return ()
        before, caller = self._running[-1]
        is_detached = module.path == () and type(module) is not type(caller)
        return before + caller.path + EVERY_LAYER if is_detached else before


def _public(module: nn.Module, method: str) -> tuple[str, ...] | None:
    """Return what a method adds to a name, or None if it is private."""
    if method == "__call__":
        return ()
    # `nn.scan` also calls functions as methods
    is_public = hasattr(type(module), method) and not method.startswith("_")
    return (method,) if is_public else None


def _is_activation(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _marked(name: str, output: Any, module: nn.Module) -> Any:
    """Return the output of a method with marks on its activations.

    Parameters of the module are none, and neither is the table of a `Head`.
    """
    parameters = jax.tree.leaves(nn.unbox(module.variables.get("params", {})))
    with_paths, structure = jax.tree.flatten_with_path(
        output, is_leaf=lambda x: isinstance(x, Head)
    )
    are_marked = [
        _is_activation(x) and not any(x is each for each in parameters)
        for _, x in with_paths
    ]
    leaves = []
    for (path, x), is_marked in zip(with_paths, are_marked, strict=True):
        words = [name]
        if sum(are_marked) > 1:
            words.append(jax.tree_util.keystr(path, simple=True, separator="/"))
        leaves.append(checkpoint_name(x, MARK + "/".join(words)) if is_marked else x)
    return jax.tree.unflatten(structure, leaves)


def pattern(name: str) -> str:
    """Return a name with "*" in place of the number of a layer."""
    return re.sub(r"(^|/)layers/\d+(?=/|$)", r"\1layers/*", name)


def layer_of(name: str) -> int:
    """Return the number of the layer in a name.

    Raises:
        ValueError: there is none.
    """
    number = re.search(r"(?:^|/)layers/(\d+)(?=/|$)", name)
    if number is None:
        raise ValueError(name)
    return int(number[1])


class _Walk:
    """One evaluation of a jaxpr."""

    def __init__(
        self,
        names: Collection[str] | None,
        replacements: Mapping[str, Replacement],
        whole_loops: bool,
    ):
        self._names = names
        self._replacements = replacements
        self._marks: set[str] | None = None  # in loops to enter; None: all
        if whole_loops and names is not None:
            self._marks = {
                pattern(name.partition("#")[0]) for name in {*names, *replacements}
            }
        # name → number of the position, or None → activation
        self._values: dict[str, dict[int | None, Any]] = collections.defaultdict(dict)
        self._times: collections.Counter[tuple] = collections.Counter()
        self._loops: list[int] = []  # the numbers of the current iterations
        # layers of each stack that have begun, where layers are written out
        self._begun: collections.Counter[str] = collections.Counter()

    def found(self) -> dict[str, Found]:
        """Return the wanted activations, those of all positions together."""
        found = {}
        for name, values in self._values.items():
            if None in values:
                found[name] = Found(values[None], stepwise=False)
            else:
                in_order = [values[position] for position in range(len(values))]
                found[name] = Found(jnp.stack(in_order, axis=1), stepwise=True)
        return found

    def through(
        self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of a jaxpr."""
        values: dict[Any, Any] = {}
        values.update(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Any:
            return variable.val if hasattr(variable, "val") else values[variable]

        for equation in jaxpr.eqns:
            given = [read(variable) for variable in equation.invars]
            outputs = self._of_equation(equation, given)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _of_equation(self, equation: Any, given: list[Any]) -> list[Any]:
        parameters = equation.params
        kind = equation.primitive.name
        if name := _name_in(equation):
            return [self._visit(name, given[0])]
        inner = parameters.get("jaxpr")
        marks = set() if inner is None else _names_in(inner)
        if marks and kind == "scan":
            if self._marks is None or marks & self._marks:
                return self._loop(parameters, given)
        elif marks:  # a call: of `jax.jit` or `jax.checkpoint`
            jaxpr = getattr(inner, "jaxpr", inner)
            return self.through(jaxpr, getattr(inner, "consts", ()), given)
        options = equation.primitive.get_bind_params(parameters)
        with equation.ctx.manager:
            output = equation.primitive.bind(*given, **options)
        return output if equation.primitive.multiple_results else [output]

    def _loop(self, parameters: Mapping[str, Any], given: list[Any]) -> list[Any]:
        """Return the outputs of a scan."""
        body = parameters["jaxpr"]
        length = parameters["length"]
        end = parameters["num_consts"]
        num_carry = parameters["num_carry"]
        constants = given[:end]
        carry = given[end : end + num_carry]
        by_iteration: list[list[Any]] = [[]] * length
        numbers = range(length)
        for number in reversed(numbers) if parameters["reverse"] else numbers:
            inputs = [_at(x, number, 0) for x in given[end + num_carry :]]
            self._loops.append(number)
            outputs = self.through(
                body.jaxpr, body.consts, [*constants, *carry, *inputs]
            )
            self._loops.pop()
            carry = outputs[:num_carry]
            by_iteration[number] = outputs[num_carry:]
        stacked = [jnp.stack(values) for values in zip(*by_iteration, strict=True)]
        return [*carry, *stacked]

    def _visit(self, name: str, x: Any) -> Any:
        """Replace an activation if it is to be, and keep it if it is wanted."""
        loops = list(self._loops)
        if "*" in name.split("/"):
            stack, _, part = name.partition("/*")
            if loops:
                layer = loops.pop(0)
            else:
                self._begun[stack] += part == "/input"
                layer = self._begun[stack] - 1
            name = f"{stack}/{layer}{part}"
        self._times[name, *loops] += 1
        times = self._times[name, *loops]
        if loops:  # an activation of a loop is another one than those before it
            times += self._times[name,]
        if times > 1:
            name = f"{name}#{times}"
        position = loops[-1] if loops else None
        if name in self._replacements:
            x = _replaced(name, x, self._replacements[name], position)
        if self._names is None or name in self._names:
            self._values[name][position] = x
        return x


def _at(x: Any, number: int, axis: int) -> jax.Array:
    """Return x at one place of an axis, by one compiled program for all places."""
    return jax.lax.dynamic_index_in_dim(x, jnp.int32(number), axis, keepdims=False)


def _replaced(
    name: str, x: Any, replacement: Replacement, position: int | None
) -> jax.Array:
    """Return what replaces an activation, with its type."""
    given = () if position is None else (position,)
    if not callable(replacement):
        new = jnp.asarray(replacement)
        return (_at(new, *given, 1) if given else new).astype(x.dtype)
    new = jnp.asarray(replacement(x, *given))
    if new.shape != x.shape:
        raise UserError(
            f"{name}: the function returns shape {new.shape} for an activation of "
            f"shape {x.shape}: it must keep the shape"
        )
    return new.astype(x.dtype)


def _name_in(equation: Any) -> str:
    """Return the name that an equation marks, or ""."""
    name = equation.params.get("name")
    if equation.primitive.name != "name" or not str(name).startswith(MARK):
        return ""
    return str(name).removeprefix(MARK)


def _names_in(program: Any) -> set[str]:
    """Return the names in a jaxpr, and in those inside of it that a `_Walk` enters."""
    names = set()
    for equation in getattr(program, "jaxpr", program).eqns:
        if name := _name_in(equation):
            names.add(name)
        inner = equation.params.get("jaxpr")
        if inner is not None:
            names |= _names_in(inner)
    return names
