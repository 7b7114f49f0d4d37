"""A picture of the conditions of a claim: each measurement, seed by seed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from transformer_jax.report.curves import new_figure, save

# measurement → condition → a value for each seed
Values = Mapping[str, Mapping[str, Sequence[float]]]

COLUMNS = 2  # panels beside one another


def draw_conditions(path: epath.PathLike, measured: Values) -> None:
    """Draw a panel for each measurement: a row for each condition, a dot for each seed,
    and a line at the mean.

    Values that are not finite are left out. All measurements have the same conditions.
    """
    names = list(next(iter(measured.values())))
    figure, panels = new_figure(len(measured), COLUMNS, height=1 + 0.25 * len(names))
    for number, (panel, measure) in enumerate(zip(panels, measured, strict=True)):
        conditions = measured[measure]
        for row, values in enumerate(conditions.values()):
            _draw_row(panel, row, values)
        panel.set_xlabel(measure)
        panel.set_ylim(len(names) - 0.5, -0.5)  # the first at the top
        is_left = number % COLUMNS == 0
        panel.set_yticks(
            range(len(names)), labels=names if is_left else [""] * len(names)
        )
    save(figure, panels, path)


def _draw_row(panel: Any, row: int, values: Sequence[float]) -> None:
    """Draw the values of one condition."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return
    heights = [row] * len(finite)
    panel.plot(finite, heights, "o", color="tab:blue", alpha=0.6)
    mean = sum(finite) / len(finite)
    panel.plot([mean, mean], [row - 0.3, row + 0.3], color="black")
