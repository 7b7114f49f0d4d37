"""Runs side by side: what they logged, by step, and BLEU by the length of the source."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from transformer_jax.metrics import bleu
from transformer_jax.training.logging import read_rows


class Curve(NamedTuple):
    """What was logged of one value on one split."""

    steps: list[int]
    values: list[float]


class LengthScore(NamedTuple):
    """BLEU of the sentences whose sources have `shortest` to `longest` words."""

    shortest: int
    longest: int
    sentences: int
    bleu: float


def read_curves(workdir: epath.PathLike, name: str) -> dict[str, Curve]:
    """split → the curve of `name` there, or of its mean since the last row, from a run's metrics.jsonl.

    Raises ValueError where that is missing, or has no number of this name, naming those that it has.
    """
    path = epath.Path(workdir) / "metrics.jsonl"
    rows = [row for _, row in read_rows(path)]
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


def bleu_by_length(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], edges: Sequence[int], tokenized: bool
) -> list[LengthScore]:
    """Corpus BLEU of the sentences with up to edges[0] words, then with more and up to edges[1], and so on; the last
    part takes the rest. Words are what stands between spaces. A part without sentences is left out. Readings of BLEU
    are those of `metrics.bleu`: `tokenized` or sacreBLEU's own. After Bahdanau et al. 2015, Figure 2.

    Raises ValueError for edges that do not rise from 1 or more.
    """
    edges = check_edges(edges)
    lengths = [len(source.split()) for source in sources]
    scores = []
    for shortest, longest in zip([-1, *edges], [*edges, max([*lengths, edges[-1] + 1])], strict=True):
        here = [i for i, length in enumerate(lengths) if shortest < length <= longest]
        if here:
            found = bleu([hypotheses[i] for i in here], [references[i] for i in here])
            score = found["bleu_tokenized" if tokenized else "bleu"]
            scores.append(LengthScore(shortest + 1, longest, len(here), float(score)))
    return scores


def check_edges(edges: Sequence[int] | Sequence[str]) -> list[int]:
    """The same as numbers. Raises ValueError for what is none, and where they do not rise from 1 or more."""
    if not all(str(edge).isdecimal() for edge in edges):
        raise ValueError(f"the lengths {','.join(map(str, edges))} must be whole numbers: as 10,20,30")
    numbers = [int(edge) for edge in edges]
    if not numbers or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise ValueError(f"the lengths {numbers} must rise, from 1 or more: as 10,20,30")
    return numbers


def check_picture(path: epath.PathLike) -> str:
    """How a picture of this name is written. Raises ValueError for an unknown ending, and without matplotlib."""
    figure, _ = _figure(1)
    ending = epath.Path(path).suffix.lstrip(".")
    if ending not in (known := figure.canvas.get_supported_filetypes()):
        raise ValueError(f"the picture {path} must end in one of {', '.join('.' + name for name in sorted(known))}")
    return ending


def draw_curves(path: epath.PathLike, runs: Mapping[str, Mapping[str, Mapping[str, Curve]]]) -> None:
    """Draws `runs`, name → {value: its curves by split}: one picture a value, a colour a run, training dotted."""
    values = list(dict.fromkeys(value for curves in runs.values() for value in curves))
    figure, axes = _figure(len(values))
    for axis, value in zip(axes, values, strict=True):
        for color, (run, curves) in zip(_colors(len(runs)), runs.items(), strict=True):
            for split, curve in curves.get(value, {}).items():
                style = ":" if split == "train" else "-"
                axis.plot(curve.steps, curve.values, style, color=color, label=f"{run}, {split}")
        axis.set(xlabel="step", ylabel=value)
    _save(figure, axes, path)


def draw_bleu_by_length(path: epath.PathLike, runs: Mapping[str, Sequence[LengthScore]]) -> None:
    """Draws `runs`, name → scores, over the middle of each part's lengths."""
    figure, axes = _figure(1)
    for color, (run, scores) in zip(_colors(len(runs)), runs.items(), strict=True):
        middles = [(score.shortest + score.longest) / 2 for score in scores]
        axes[0].plot(middles, [score.bleu for score in scores], "o-", color=color, label=run)
    axes[0].set(xlabel="words of the source", ylabel="BLEU", ylim=(0, None))
    _save(figure, axes, path)


def _figure(count: int) -> tuple[Any, Sequence[Any]]:
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no state
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'transformer_jax[plots]'") from error
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
    with epath.Path(path).open("wb") as file:
        figure.savefig(file, format=ending)
