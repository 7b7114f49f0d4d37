"""Two programs that take turns on one device, so that the ratio of their speeds depends
less on what else the machine does.
"""

import statistics
from collections.abc import Callable
from typing import Any

Turn = Callable[[], float]


def compare(
    here: Turn, other: Turn, rounds: int
) -> tuple[float, float, dict[str, Any]]:
    """Let both run once per round, and return the median seconds of each, and the ratio
    with its range. 2 means that `here` is twice as fast.

    A turn returns the seconds that it took.
    """
    times = [(here(), other()) for _ in range(rounds)]
    ours, theirs = (statistics.median(side) for side in zip(*times, strict=True))
    ratios = [b / a for a, b in times]
    ratio = {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    return ours, theirs, ratio
