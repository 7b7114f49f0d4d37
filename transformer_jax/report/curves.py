"""Plots that compare runs: logged values over training steps, and scores over source
length.
"""

import fnmatch
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from transformer_jax import files
from transformer_jax.errors import UserError
from transformer_jax.training.logging import read_rows


class Curve(NamedTuple):
    """The logged values of one metric on one split."""

    steps: list[int]
    values: list[float]


class LengthScore(NamedTuple):
    """Score over the examples with `shortest` to `longest` source words or positions,
    and the number of these examples.
    """

    shortest: int
    longest: int
    examples: int
    score: float


def read_curves(workdir: epath.PathLike, name: str) -> dict[str, Curve]:
    """Read the values `name` of each split from a run's metrics.jsonl: {split: curve}.

    A row's `mean_NAME`, the mean since the previous row, takes precedence over its
    NAME, the value at one step.

    Raises ValueError if the file is missing or has no number of this name. The message
    lists the names in the file.
    """
    path, rows = _logged(workdir)
    curves: dict[str, Curve] = {}
    for row in rows:
        value = row.get(f"mean_{name}", row.get(name))
        _add(curves, row["split"], row["step"], value)
    if not curves:
        raise UserError(f"{path} has no {name!r}: choose from {_names(rows)}")
    return curves


def is_family(name: str) -> bool:
    """Return True for a pattern of names, e.g. "gradient_norm/*"."""
    return "*" in name


def read_family(workdir: epath.PathLike, pattern: str) -> dict[str, Curve]:
    """Read all values of the training rows whose names match a pattern, e.g. those of
    every layer for "gradient_norm/*".

    Raises UserError like `read_curves`.
    """
    path, rows = _logged(workdir)
    curves: dict[str, Curve] = {}
    for row in rows:
        if row["split"] == "train":
            for name in fnmatch.filter(row, pattern):
                _add(curves, name, row["step"], row[name])
    if not curves:
        raise UserError(f"{path} has no {pattern!r}: choose from {_names(rows)}")
    return curves


def _logged(workdir: epath.PathLike) -> tuple[epath.Path, list[dict[str, Any]]]:
    """Return the path and the rows of a run's metrics.jsonl."""
    path = epath.Path(workdir) / "metrics.jsonl"
    rows = [row for _, row in read_rows(path) if "split" in row]
    if not rows:
        raise UserError(
            f"{path} is missing or empty: "
            "name the folder of a run that has logged metrics"
        )
    return path, rows


def _add(curves: dict[str, Curve], key: str, step: int, value: Any) -> None:
    """Add a point to the curve of `key` if the value is a number."""
    if isinstance(value, int | float):
        curve = curves.setdefault(key, Curve([], []))
        curve.steps.append(step)
        curve.values.append(value)


def _names(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of the numbers in rows, in words. Those of layers are families,
    e.g. "gradient_norm/*".
    """
    names = {
        f"{key.partition('/')[0]}/*" if "/" in key else key
        for row in rows
        for key, value in row.items()
        if isinstance(value, int | float)
    }
    return ", ".join(sorted(names - {"step"}))


def score_by_length(
    records: Sequence[Any],
    predictions: Sequence[Any],
    references: Sequence[Any],
    edges: Sequence[int],
    metric: str,
    score: Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]],
    positions: Sequence[int] | None = None,
) -> list[LengthScore]:
    """Return `metric` for groups of examples by source length, as in Bahdanau et al.
    2015, Figure 2.

    The first group has sources of up to edges[0] words, the next of up to edges[1]
    words, and so on; the last has all longer ones. Empty groups are left out. Words are
    separated by whitespace; those of all texts of a record count. If the records are
    no texts, `positions` are their lengths. `score(predictions, references)` returns
    metrics by name.

    Raises ValueError if `edges` are not increasing integers from 1, if there are no
    records, or if `score` does not return `metric`.
    """
    edges = check_edges(edges)
    if not records:
        raise UserError("scores by length need records of text, and this task has none")
    lengths = _words(records) if positions is None else list(positions)
    scores = []
    last = max([*lengths, edges[-1] + 1])
    for shortest, longest in zip([-1, *edges], [*edges, last], strict=True):
        group = [i for i, length in enumerate(lengths) if shortest < length <= longest]
        if not group:
            continue
        values = score([predictions[i] for i in group], [references[i] for i in group])
        if not isinstance(values.get(metric), int | float):
            choices = [
                name for name, value in values.items() if isinstance(value, int | float)
            ]
            raise UserError(
                f"there is no metric {metric!r}: choose from {', '.join(choices)}"
            )
        value = float(values[metric])
        scores.append(LengthScore(shortest + 1, longest, len(group), value))
    return scores


def _words(records: Sequence[Any]) -> list[int]:
    """Return the number of words of each record, a text or an object of texts."""
    texts = (
        [record] if isinstance(record, str) else record.values() for record in records
    )
    return [sum(len(text.split()) for text in record) for record in texts]


def check_edges(edges: Sequence[int] | Sequence[str]) -> list[int]:
    """Return the edges as integers.

    Raises ValueError if they are not increasing integers, at least 1.
    """
    if not all(str(edge).isdecimal() for edge in edges):
        raise UserError(
            f"the lengths {','.join(map(str, edges))} must be integers, e.g. 10,20,30"
        )
    numbers = [int(edge) for edge in edges]
    if not numbers or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise UserError(
            f"the lengths {numbers} must be increasing and at least 1, e.g. 10,20,30"
        )
    return numbers


def check_picture(path: epath.PathLike) -> str:
    """Return the image format of a file name.

    Raises ValueError for an unknown suffix, and without matplotlib.
    """
    figure, _ = new_figure(1)
    ending = epath.Path(path).suffix.lstrip(".")
    formats = figure.canvas.get_supported_filetypes()
    if ending not in formats:
        raise UserError(
            f"the image file {path} must end in one "
            f"of {', '.join('.' + name for name in sorted(formats))}"
        )
    return ending


def draw_curves(
    path: epath.PathLike,
    runs: Mapping[str, Mapping[str, Mapping[str, Curve]]],
    label: Callable[[str, str, str], str] = lambda run, split, value: value,
) -> None:
    """Plot `runs`, {run: {value: {split: curve}}}: a panel per value, a color per run,
    dotted lines for training.

    `label(run, split, value)` returns a label for the value, e.g. "bleu (greedy)". If
    it is the same for all curves of a panel, it labels the axis; otherwise it is part
    of the legend.

    The curves of a family, see `read_family`, have colors in their order, and each run
    has a style of line.
    """
    values = list(dict.fromkeys(value for curves in runs.values() for value in curves))
    figure, axes = new_figure(len(values))
    for axis, value in zip(axes, values, strict=True):
        if is_family(value):
            _draw_family(
                axis, value, {run: curves[value] for run, curves in runs.items()}
            )
            continue
        labels = {
            (run, split): label(run, split, value)
            for run, curves in runs.items()
            for split in curves.get(value, {})
        }
        same = len(set(labels.values())) == 1
        for color, (run, curves) in zip(_colors(len(runs)), runs.items(), strict=True):
            for split, curve in curves.get(value, {}).items():
                style = ":" if split == "train" else "-"
                shown = (
                    f"{run}, {split}"
                    if same
                    else f"{run}, {split}: {labels[run, split]}"
                )
                axis.plot(curve.steps, curve.values, style, color=color, label=shown)
        axis.set(xlabel="step", ylabel=min(labels.values()) if same else value)
    save(figure, axes, path)


def _draw_family(
    axis: Any, pattern: str, runs: Mapping[str, Mapping[str, Curve]]
) -> None:
    """Plot the curves of a family in one panel."""
    import matplotlib

    names = list(dict.fromkeys(name for curves in runs.values() for name in curves))
    shades = matplotlib.colormaps["viridis"]
    for style, (run, curves) in zip(
        itertools.cycle(("-", "--", ":", "-.")), runs.items(), strict=False
    ):
        for name, curve in curves.items():
            color = shades(names.index(name) / len(names))
            label = name.removeprefix(pattern.partition("*")[0])
            if len(runs) > 1:
                label = f"{run}, {label}"
            axis.plot(curve.steps, curve.values, style, color=color, label=label)
    axis.set(xlabel="step", ylabel=pattern)


def draw_by_length(
    path: epath.PathLike,
    runs: Mapping[str, Sequence[LengthScore]],
    metric: str,
    axis_label: str = "source length (words)",
) -> None:
    """Plot `runs`, {run: scores}, each score at the middle of its group's lengths,
    which are on the axis with `axis_label`.
    """
    figure, axes = new_figure(1)
    for color, (run, scores) in zip(_colors(len(runs)), runs.items(), strict=True):
        middles = [(part.shortest + part.longest) / 2 for part in scores]
        axes[0].plot(
            middles, [part.score for part in scores], "o-", color=color, label=run
        )
    axes[0].set(xlabel=axis_label, ylabel=metric, ylim=(0, None))
    save(figure, axes, path)


def new_figure(
    count: int, columns: int | None = None, height: float = 4
) -> tuple[Any, Sequence[Any]]:
    """Return a figure with `count` panels, and the panels.

    columns: panels beside one another; all of them by default.
    height: height of a panel, in inches.

    Raises ValueError without matplotlib.
    """
    try:
        # not pyplot, which has global state and may open windows
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "plots need matplotlib: "
            "pip install -c constraints.txt -e '.[plots]' in this repository"
        ) from error
    columns = min(columns or count, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(6 * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def _colors(count: int) -> list[Any]:
    import matplotlib

    return [
        matplotlib.colormaps["tab10" if count <= 10 else "tab20"](i % 20)
        for i in range(count)
    ]


def save(figure: Any, axes: Sequence[Any], path: epath.PathLike) -> None:
    """Write a figure with the panels `axes` to a file. An SVG file keeps words as text,
    and is the same for the same figure.

    Raises ValueError, see `check_picture`.
    """
    import matplotlib

    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    ending = check_picture(path)
    metadata = {"Date": None} if ending == "svg" else None
    with (
        files.replacing(path) as file,
        matplotlib.rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "transformer_jax"}
        ),
    ):
        figure.savefig(file, format=ending, metadata=metadata)
