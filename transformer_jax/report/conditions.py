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

    Conditions without a value have no row. Values that are not finite are left out.
    """
    shown = [
        {name: values for name, values in conditions.items() if values}
        for conditions in measured.values()
    ]
    most = max(len(conditions) for conditions in shown)
    figure, panels = new_figure(len(measured), COLUMNS, height=1 + 0.25 * most)
    before: list[str] = []  # names of the panel to the left
    for number, (panel, measure) in enumerate(zip(panels, measured, strict=True)):
        conditions = shown[number]
        for row, values in enumerate(conditions.values()):
            _draw_row(panel, row, values)
        panel.set_xlabel(measure)
        panel.set_ylim(len(conditions) - 0.5, -0.5)  # the first at the top
        names = list(conditions)
        is_repeated = number % COLUMNS > 0 and names == before
        panel.set_yticks(
            range(len(names)), labels=[""] * len(names) if is_repeated else names
        )
        before = names
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
