"""Look inside the model of a run: capture and replace its activations, decode each
layer, and attribute its predictions to what it reads.

For the names of activations, see `naming`. The model reads records in one pass, without
dropout. A model that writes text reads the target of the records, or its own output if
a record has none. All records are rows of one batch, padded to one length. A record
that is read in several windows has a row for each. Equations run one by one, so results
differ from those of a compiled model by rounding, and between calls not at all.
"""

import difflib
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import naming
from transformer_jax.data.batching import Batch
from transformer_jax.errors import UserError
from transformer_jax.naming import Found, Replacement
from transformer_jax.predictor import Predictor, checked
from transformer_jax.training.evaluation import AttentionMap
from transformer_jax.training.task import (
    Axis,
    DeviceArrays,
    Forward,
    Inspected,
    Record,
)

Replacements = Mapping[str, Replacement | np.ndarray]

NEAR = 5  # names that an error message lists
STREAM = re.compile(r"(?P<stack>(?:.*/)?layers)/(?P<layer>\d+)")


class Lens(NamedTuple):
    """The most probable outcomes by the residual stream before and after each layer.

    layers: "input", "layer 1", …
    positions: labels of the T positions.
    outcomes: (layers, T, K) names, most probable first.
    probabilities: (layers, T, K).
    """

    layers: list[str]
    positions: list[str]
    outcomes: list[list[list[str]]]
    probabilities: np.ndarray


def activations(
    run: Predictor, records: Sequence[Record] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the names and the shapes of all activations, in the order in which they
    are computed.

    The shapes are those that `capture` returns for these records, or for one of 8
    positions.
    """
    model = _of(run)
    found = model.known(model.batch(records)).found
    return {name: each.value.shape for name, each in found.items()}


def capture(
    run: Predictor,
    records: Sequence[Record],
    names: str | Collection[str],
    replacements: Replacements | None = None,
) -> dict[str, np.ndarray]:
    """Return activations while the model reads records: {name: array}.

    The first axis of an array has a row for each record. Positions after the end of a
    row are padding.

    Args:
        run: what `transformer_jax.load` returns.
        records: as for `Predictor.predict`.
        names: names of activations. "*" stands for any text without "/", e.g.
            "decoder/layers/*".
        replacements: see `patch`.

    Raises:
        ValueError: a name stands for no activation, or see `patch`.
    """
    model = _of(run)
    batch = model.batch(records)
    known = model.known(batch).found
    chosen: dict[str, None] = {}  # in order, each name once
    for name in [names] if isinstance(names, str) else names:
        chosen.update(dict.fromkeys(matching(name, known)))
    checked_replacements = model.checked(batch, replacements or {})
    _, found = model.run(batch, chosen, checked_replacements)
    return {name: np.asarray(x) for name, x in found.items()}


def patch(
    run: Predictor, records: Sequence[Record], replacements: Replacements
) -> np.ndarray:
    """Return the logits of the model if some of its activations are replaced.

    They are (B, T, V) for each position of a text, or (B, V) for each text. Without
    replacements, they are those that the model computes.

    replacements: name, possibly with "*" → an array of the shape of the activation, or
        a function from the activation to such an array. Where a loop over positions
        computes the activation, e.g. in a recurrent layer, the function is given the
        activation (B, …) at one position, and the number of this position.

    Raises:
        ValueError: a name stands for no activation, or a value has another shape than
            the activation.
    """
    model = _of(run)
    batch = model.batch(records)
    forward, _ = model.run(batch, replacements=model.checked(batch, replacements))
    return np.asarray(forward.logits)


def logit_lens(run: Predictor, records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Return the logits (B, T, V) that follow from the residual stream before and
    after each layer: {name of the stream: logits}.

    The stream takes the place of the last layer's output, so it passes the final norm
    and the head (nostalgebraist 2020, "interpreting GPT: the logit lens"). The logits
    of the last layer are those of the model. Of an encoder–decoder, the layers are
    those of the decoder.

    Raises:
        ValueError: the model has no residual stream, or no outcomes at its positions.
    """
    model = _of(run)
    return model.lens(model.batch(records))[0]


def gradient_times_input(
    run: Predictor, records: Sequence[Record]
) -> dict[str, np.ndarray]:
    """Return how much each vector that the model reads adds to the logit of each
    prediction, to first order: {name of the vectors: (B, T, S)}.

    Entry (b, t, s) is ∂y/∂x · x, where x is the vector at position s and y the logit of
    the most probable outcome at position t (Shrikumar et al. 2016). T is 1 if there is
    one prediction for a text.

    Raises:
        ValueError: the task does not say which vectors are its inputs.
    """
    model = _of(run)
    return model.attributions(model.batch(records))[0]


def described(run: Predictor, record: Record) -> tuple[list[AttentionMap], Lens | None]:
    """Return gradient × input and the logit lens of one record with labels, for a
    report.

    There is a map for each sequence that the model reads. Its rows are divided by the
    sums of their absolute values. There is a lens if the model has a residual stream
    with outcomes at its positions. Of a record in several windows, the first one is
    described.

    Raises:
        ValueError: the task is not `Inspected`.
    """
    model = _of(run)
    batch = model.batch([record])
    maps = []
    if model.inputs(batch):
        values, forward = model.attributions(batch)
        outcomes = _labels(forward.outcomes)
        axes = forward.inputs.values()
        for (name, matrix), axis in zip(values.items(), axes, strict=True):
            maps.append(_attribution_map(name, matrix, outcomes, _labels(axis)))
    lens = None
    if model.stream(batch):
        logits, forward = model.lens(batch)
        lens = _lens(logits, forward)
    return maps, lens


def _attribution_map(
    name: str, matrix: np.ndarray, outcomes: list[str], inputs: list[str]
) -> AttentionMap:
    """Return the map of gradient × input (B, T, S) of the first row."""
    values = matrix[0, : len(outcomes), : len(inputs)]
    total = np.abs(values).sum(axis=-1, keepdims=True)
    shares = values / np.where(total > 0, total, 1)
    title = f"gradient × input: {name}"
    return AttentionMap(title, outcomes, inputs, shares[None, None], signed=True)


def _lens(logits: Mapping[str, np.ndarray], forward: Forward, count: int = 5) -> Lens:
    """Return the `count` most probable outcomes of the first row."""
    positions = _labels([*forward.inputs.values()][-1])
    names = ["input", *(f"layer {i}" for i in range(1, len(logits)))]
    outcomes = []
    probabilities = []
    for of_layer in logits.values():
        row = np.asarray(of_layer[0, : len(positions)], np.float64)
        row = np.exp(row - row.max(axis=-1, keepdims=True))
        row /= row.sum(axis=-1, keepdims=True)
        best = np.argsort(-row, axis=-1, kind="stable")[:, :count]
        outcomes.append([forward.outcomes.shown(ids)[0] for ids in best])
        probabilities.append(np.take_along_axis(row, best, axis=-1))
    return Lens(names, positions, outcomes, np.stack(probabilities))


def _labels(axis: Axis) -> list[str]:
    """Return the labels of the positions of the first row."""
    ids = np.asarray(axis.ids)[0, : int(axis.lengths[0])]
    return axis.shown(ids)[0]


_models: "weakref.WeakKeyDictionary[Predictor, _Model]" = weakref.WeakKeyDictionary()


def _of(run: Predictor) -> "_Model":
    """Return the model of a run, with the programs compiled so far."""
    if not isinstance(run, Predictor):
        raise UserError(
            f"run = {run!r:.80} is no loaded run: give transformer_jax.load(workdir)"
        )
    if run not in _models:
        _models[run] = _Model(run)
    return _models[run]


class _Known(NamedTuple):
    """The result and the activations of a batch, and the program that computes them.

    program: the program that computes it.
    forward: the shapes of its result.
    found: the shapes of all activations, in the order of computation.
    """

    program: naming.Program
    forward: Forward
    found: dict[str, Found]


class _Model:
    """The model of a run. It is traced once for each shape of batches."""

    def __init__(self, run: Predictor):
        task = run.task
        if not isinstance(task, Inspected):
            raise UserError(
                f"a run of the task {run.config.task} cannot be looked into: its class "
                "must extend transformer_jax.training.task.Inspected"
            )
        self._task: Any = task
        self._params = run.params
        self._columns = run.config.columns
        self._completed = jax.jit(task.completed)
        self._attributed = jax.jit(self._by_input, static_argnums=2)
        self._known: dict[tuple, _Known] = {}

    def batch(self, records: Sequence[Record] | None) -> DeviceArrays:
        """Return one batch of all records, or of a synthetic one if there are none.

        Raises:
            ValueError: the list of records is empty, or see `Predictor.predict`.
        """
        if records is None:
            arrays = self._task.dummy_batch(1, 8)
            return {name: jnp.asarray(x) for name, x in arrays.items()}
        records = checked(records, self._columns)
        if not records:
            raise UserError("there are no records: give at least one")
        batches = self._task.batches_of(records)
        parts = [batches.plan.batch(i) for i in range(len(batches.plan))]
        indices = np.concatenate([part.indices for part in parts])
        rows = np.count_nonzero(indices >= 0)
        longest = np.max([part.shape for part in parts], axis=0)
        arrays = batches.load(Batch(0, np.arange(rows), tuple(longest.tolist())))
        batch = {name: jnp.asarray(x) for name, x in arrays.items()}
        return dict(self._completed(self._params, batch))

    def known(self, batch: DeviceArrays) -> _Known:
        """Return the program for a batch, and its activations."""
        shapes = tuple((name, x.shape) for name, x in sorted(batch.items()))
        if shapes not in self._known:
            program = naming.Program(self._task.forward, self._params, batch)
            in_order: list[str] = []

            def all_of(*arguments: Any) -> tuple[Forward, dict[str, Found]]:
                forward, found = program.run(arguments, None)
                in_order.extend(found)
                return forward, found

            forward, found = jax.eval_shape(all_of, self._params, batch)
            found = {name: found[name] for name in in_order}
            self._known[shapes] = _Known(program, forward, found)
        return self._known[shapes]

    def run(
        self,
        batch: DeviceArrays,
        names: Collection[str] = (),
        replacements: Mapping[str, Replacement] | None = None,
    ) -> tuple[Forward, dict[str, jax.Array]]:
        """Return the result and the activations with these names."""
        program = self.known(batch).program
        forward, found = program.run((self._params, batch), names, replacements)
        return forward, {name: found[name].value for name in names}

    def checked(
        self, batch: DeviceArrays, replacements: Replacements
    ) -> dict[str, Replacement]:
        """Return what replaces each activation, by its full name."""
        known = self.known(batch).found
        each: dict[str, Replacement] = {}
        for key, value in replacements.items():
            for name in matching(key, known):
                if callable(value):
                    _check_function(name, value, known[name].stepwise)
                    each[name] = value
                else:
                    each[name] = _checked_array(name, value, known[name].value.shape)
        return each

    def stream(self, batch: DeviceArrays) -> tuple[str, ...]:
        """Return the names of the residual stream before and after each layer of the
        last stack, if its positions have outcomes.
        """
        known = self.known(batch)
        if known.forward.logits.ndim != 3:
            return ()
        of_stacks: dict[str, list[str]] = {}  # the last stack comes last
        for name in known.found:
            if match := STREAM.fullmatch(name):
                of_stacks.setdefault(match["stack"], []).append(name)
        if not of_stacks:
            return ()
        layers = sorted([*of_stacks.values()][-1], key=naming.layer_of)
        return f"{layers[0]}/input", *layers

    def lens(self, batch: DeviceArrays) -> tuple[dict[str, np.ndarray], Forward]:
        """See `logit_lens`."""
        names = self.stream(batch)
        if not names:
            logits = self.known(batch).forward.logits
            if logits.ndim != 3:
                raise UserError(
                    f"the model has no head for the lens: it predicts one of "
                    f"{logits.shape[-1]} outcomes for a whole text, not for each "
                    "position; read activations with capture"
                )
            raise UserError(
                "the model has no residual stream for the lens, i.e. no stack of "
                "layers; read activations with capture"
            )
        forward, streams = self.run(batch, names)
        lens = {}
        for name, x in streams.items():
            last, _ = self.run(batch, replacements={names[-1]: x})
            lens[name] = np.asarray(last.logits)
        return lens, forward

    def inputs(self, batch: DeviceArrays) -> tuple[str, ...]:
        """Return the names of the vectors that the model reads."""
        known = self.known(batch)
        names = list(known.found)
        return tuple(_first_with_end(end, names) for end in known.forward.inputs)

    def attributions(
        self, batch: DeviceArrays
    ) -> tuple[dict[str, np.ndarray], Forward]:
        """See `gradient_times_input`."""
        names = self.inputs(batch)
        if not names:
            raise UserError(
                "the task does not say which vectors its model reads, e.g. because it "
                "reads each pair of texts in two orders"
            )
        matrices, forward = self._attributed(self._params, batch, names)
        return {name: np.asarray(matrices[name]) for name in names}, forward

    def _by_input(
        self, params: Any, batch: DeviceArrays, names: tuple[str, ...]
    ) -> tuple[dict[str, jax.Array], Forward]:
        """Return gradient × input {name: (B, T, S)} and the result. Compiled."""
        run = functools.partial(
            self.known(batch).program.run, (params, batch), whole_loops=True
        )
        forward, found = run(names)
        vectors = {name: found[name].value for name in names}
        chosen = forward.outcomes.ids

        def predictions(vectors: dict[str, jax.Array]) -> jax.Array:
            """Return the logits (B, T) of the chosen outcomes."""
            logits = run(replacements=vectors)[0].logits
            logits = logits.reshape(*chosen.shape, -1)
            return jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]

        values, pull = jax.vjp(predictions, vectors)

        def of_position(t: jax.Array) -> dict[str, jax.Array]:
            (gradients,) = pull(jnp.zeros_like(values).at[:, t].set(1))
            return {
                name: (gradients[name] * x).astype(jnp.float32).sum(axis=-1)
                for name, x in vectors.items()
            }

        by_position = jax.lax.map(of_position, jnp.arange(chosen.shape[1]))
        return {name: x.swapaxes(0, 1) for name, x in by_position.items()}, forward


def matching(name: str, known: Collection[str]) -> list[str]:
    """Return the names of activations that a name, possibly with "*", stands for.

    Raises:
        ValueError: there is none.
    """
    words = map(re.escape, str(name).split("*"))
    form = re.compile("[^/]*".join(words))
    if found := [each for each in known if form.fullmatch(each)]:
        return found
    layers = [
        naming.layer_of(each)
        for each in known
        if naming.pattern(each) == naming.pattern(str(name)) != each
    ]
    if layers:
        raise UserError(
            f"{name!r}: there is no such layer; layers are counted from 0 to "
            f"{max(layers)}"
        )
    near = difflib.get_close_matches(str(name), list(known), NEAR, cutoff=0)
    raise UserError(
        f"{name!r} is no activation of this model. Near names are {', '.join(near)}; "
        "transformer_jax.activations lists all"
    )


def _first_with_end(end: str, names: Sequence[str]) -> str:
    """Return the vectors that an end in `Forward.inputs` stands for."""
    for more in ("", "_embedding", "/embed"):
        for name in names:
            if name == end + more or name.endswith(f"/{end}{more}"):
                return name
    raise UserError(
        f"Forward.inputs has {end!r}, but no activation has a name with this end: give "
        f"one of {', '.join(names)}"
    )


def _checked_array(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return a value that replaces an activation of this shape."""
    array = np.asarray(value)
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.number):
        raise UserError(
            f"{name}: the value is an array of {array.dtype} of shape {array.shape}, "
            f"but the activation has shape {shape}: give numbers of this shape, or a "
            "function from the activation to them"
        )
    return jnp.asarray(array)


def _check_function(name: str, function: Callable, stepwise: bool) -> None:
    """Raise UserError if a function that replaces an activation takes other arguments
    than it gets.
    """
    arguments: tuple[None, ...] = (None,)
    words = "the activation"
    if stepwise:
        arguments = (None, None)
        words = "the activation at one position, and the number of the position"
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        raise UserError(f"{name}: the function must take {words}") from None
    except ValueError:  # a function of C, whose arguments are not known
        return
