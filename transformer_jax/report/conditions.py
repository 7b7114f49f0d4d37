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
    shown = [_with_values(conditions) for conditions in measured.values()]
    most = max(map(len, shown))
    height = 1 + 0.25 * most
    figure, panels = new_figure(len(measured), COLUMNS, height=height)
    for panel, measure, conditions in zip(panels, measured, shown, strict=True):
        panel.set_xlabel(measure)
        _draw_panel(panel, conditions)
    for number in range(len(shown)):
        is_left = number % COLUMNS == 0
        if not is_left and list(shown[number]) == list(shown[number - 1]):
            panels[number].set_yticklabels([])
    save(figure, panels, path)


def _with_values(
    conditions: Mapping[str, Sequence[float]],
) -> dict[str, Sequence[float]]:
    """Return the conditions that have a value."""
    return {name: values for name, values in conditions.items() if values}


def _draw_panel(panel: Any, conditions: Mapping[str, Sequence[float]]) -> None:
    """Draw a measurement, with the first condition at the top."""
    for row, values in enumerate(conditions.values()):
        _draw_row(panel, row, values)
    panel.set_ylim(len(conditions) - 0.5, -0.5)
    panel.set_yticks(range(len(conditions)), labels=list(conditions))


def _draw_row(panel: Any, row: int, values: Sequence[float]) -> None:
    """Draw the values of one condition."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return
    heights = [row] * len(finite)
    panel.plot(finite, heights, "o", color="tab:blue", alpha=0.6)
    mean = sum(finite) / len(finite)
    panel.plot([mean, mean], [row - 0.3, row + 0.3], color="black")
