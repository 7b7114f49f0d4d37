"""Draw runs side by side: what they logged over steps, and scores over the length of the source."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from transformer_jax import files
from transformer_jax.training.logging import read_rows


class Curve(NamedTuple):
    """The logged values of one name on one split."""

    steps: list[int]
    values: list[float]


class LengthScore(NamedTuple):
    """The score of the `examples` examples whose sources have `shortest` to `longest` words."""

    shortest: int
    longest: int
    examples: int
    score: float


def read_curves(workdir: epath.PathLike, name: str) -> dict[str, Curve]:
    """Read {split: curve} of `name` from a run's metrics.jsonl; training curves are means since the row before.

    Raises ValueError where the file is missing, or has no number of this name, naming those that it has.
    """
    path = epath.Path(workdir) / "metrics.jsonl"
    rows = [row for _, row in read_rows(path) if "split" in row]
    if not rows:
        raise ValueError(f"{path} is missing or empty: name the folder of a run that has logged something")
    curves: dict[str, Curve] = {}
    for row in rows:
        value = row.get(f"mean_{name}", row.get(name))
        if isinstance(value, int | float):
            curve = curves.setdefault(row["split"], Curve([], []))
            curve.steps.append(row["step"])
            curve.values.append(value)
    if not curves:
        known = sorted({key for row in rows for key, value in row.items() if isinstance(value, int | float)} - {"step"})
        raise ValueError(f"{path} has no {name!r}: choose from {', '.join(known)}")
    return curves


def score_by_length(
    records: Sequence[Any],
    predictions: Sequence[Any],
    references: Sequence[Any],
    edges: Sequence[int],
    metric: str,
    score: Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]],
) -> list[LengthScore]:
    """Return `metric` of the examples with up to edges[0] words, then with more and up to edges[1], and so on.

    The last part takes the rest; a part without examples is left out. Words are what stands between spaces.
    `score(predictions, references)` returns metrics by name. After Bahdanau et al. 2015, Figure 2.

    Raises ValueError for edges that do not rise from 1 or more, for records that are not text, and for a metric that
    `score` does not return.
    """
    edges = check_edges(edges)
    if not records or not all(isinstance(record, str) for record in records):
        raise ValueError("scores by length need records that are lines of text, and this task has none")
    lengths = [len(record.split()) for record in records]
    scores = []
    for shortest, longest in zip([-1, *edges], [*edges, max([*lengths, edges[-1] + 1])], strict=True):
        here = [i for i, length in enumerate(lengths) if shortest < length <= longest]
        if here:
            found = score([predictions[i] for i in here], [references[i] for i in here])
            if not isinstance(found.get(metric), int | float):
                numbers = [name for name, value in found.items() if isinstance(value, int | float)]
                raise ValueError(f"there is no metric {metric!r}: choose from {', '.join(numbers)}")
            scores.append(LengthScore(shortest + 1, longest, len(here), float(found[metric])))
    return scores


def check_edges(edges: Sequence[int] | Sequence[str]) -> list[int]:
    """Return the edges as numbers. Raises ValueError if they are not, or do not rise from 1 or more."""
    if not all(str(edge).isdecimal() for edge in edges):
        raise ValueError(f"the lengths {','.join(map(str, edges))} must be whole numbers, e.g. 10,20,30")
    numbers = [int(edge) for edge in edges]
    if not numbers or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise ValueError(f"the lengths {numbers} must rise, from 1 or more, e.g. 10,20,30")
    return numbers


def check_picture(path: epath.PathLike) -> str:
    """Return the format of a picture of this name. Raises ValueError for an unknown ending, and without matplotlib."""
    figure, _ = _figure(1)
    ending = epath.Path(path).suffix.lstrip(".")
    if ending not in (known := figure.canvas.get_supported_filetypes()):
        raise ValueError(f"the picture {path} must end in one of {', '.join('.' + name for name in sorted(known))}")
    return ending


def draw_curves(
    path: epath.PathLike,
    runs: Mapping[str, Mapping[str, Mapping[str, Curve]]],
    label: Callable[[str, str, str], str] = lambda run, split, value: value,
) -> None:
    """Draw `runs`, name → {value: curves by split}: a panel for each value, a colour for each run, training dotted.

    `label` returns what the value of a run and split is called, e.g. "bleu (greedy)". Where the curves of a panel
    differ in it, it is in their legend, else on the axis.
    """
    values = list(dict.fromkeys(value for curves in runs.values() for value in curves))
    figure, axes = _figure(len(values))
    for axis, value in zip(axes, values, strict=True):
        labels = {
            (run, split): label(run, split, value) for run, found in runs.items() for split in found.get(value, {})
        }
        same = len(set(labels.values())) == 1
        for color, (run, curves) in zip(_colors(len(runs)), runs.items(), strict=True):
            for split, curve in curves.get(value, {}).items():
                style = ":" if split == "train" else "-"
                shown = f"{run}, {split}" if same else f"{run}, {split}: {labels[run, split]}"
                axis.plot(curve.steps, curve.values, style, color=color, label=shown)
        axis.set(xlabel="step", ylabel=min(labels.values()) if same else value)
    _save(figure, axes, path)


def draw_by_length(path: epath.PathLike, runs: Mapping[str, Sequence[LengthScore]], metric: str) -> None:
    """Draw `runs`, name → scores, over the middle of each part's lengths."""
    figure, axes = _figure(1)
    for color, (run, scores) in zip(_colors(len(runs)), runs.items(), strict=True):
        middles = [(part.shortest + part.longest) / 2 for part in scores]
        axes[0].plot(middles, [part.score for part in scores], "o-", color=color, label=run)
    axes[0].set(xlabel="words of the source", ylabel=metric, ylim=(0, None))
    _save(figure, axes, path)


def _figure(count: int) -> tuple[Any, Sequence[Any]]:
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no state
    except ImportError as error:
        raise ValueError(
            "pictures need matplotlib: pip install -c constraints.txt -e '.[plots]' in the folder of transformer_jax"
        ) from error
    figure = Figure(figsize=(6 * count, 4), layout="constrained")
    return figure, [figure.add_subplot(1, count, i + 1) for i in range(count)]


def _colors(count: int) -> list[Any]:
    import matplotlib

    return [matplotlib.colormaps["tab10" if count <= 10 else "tab20"](i % 20) for i in range(count)]


def _save(figure: Any, axes: Sequence[Any], path: epath.PathLike) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    ending = check_picture(path)
    with files.replacing(path) as file:
        figure.savefig(file, format=ending)
