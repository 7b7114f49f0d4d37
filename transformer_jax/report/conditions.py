"""A picture of the conditions of a claim: each measurement, seed by seed."""

import math
from collections.abc import Mapping, Sequence

from etils import epath

from transformer_jax.report.curves import new_figure, save

# measurement → condition → a value for each seed
Values = Mapping[str, Mapping[str, Sequence[float]]]


def draw_conditions(path: epath.PathLike, measured: Values) -> None:
    """Draw a panel for each measurement: a row for each condition, a dot for each seed,
    and a line at the mean.

    Values that are not finite are left out. All measurements have the same conditions.
    """
    figure, panels = new_figure(len(measured))
    for panel, (measure, conditions) in zip(panels, measured.items(), strict=True):
        for row, values in enumerate(conditions.values()):
            finite = [value for value in values if math.isfinite(value)]
            panel.plot(finite, [row] * len(finite), "o", color="tab:blue", alpha=0.6)
            if finite:
                mean = sum(finite) / len(finite)
                panel.plot([mean, mean], [row - 0.3, row + 0.3], color="black")
        panel.set(xlabel=measure, ylim=(len(conditions) - 0.5, -0.5))
        names = list(conditions) if panel is panels[0] else [""] * len(conditions)
        panel.set_yticks(range(len(conditions)), names)
    save(figure, panels, path)
