"""Estimates for a target that this machine is not."""

import pytest

from transformer_jax.compilation import target
from transformer_jax.compilation.chips import CHIPS
from transformer_jax.compilation.collectives import Collective
from transformer_jax.compilation.step_time import StepTime, Time


@pytest.mark.parametrize(
    ("step", "held", "error", "words"),
    [
        (
            "train",
            2**31,
            (
                "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. "
                "Used 38.30G of 15.75G hbm. Exceeded hbm capacity by 22.55G."
            ),
            [
                "does not fit by 22.55 GiB: a device has 15.75 GiB",
                "takes 2.00 GiB",
                "training.microbatches",
            ],
        ),
        (
            "train",
            10 * 2**30,
            (
                "RESOURCE_EXHAUSTED: the total memory "
                "required for HLO temporaries (1.00T) exceeds available HBM (15.75G)."
            ),
            ["by 1008.25 GiB", "takes 10.00 GiB", "a larger fsdp or tensor in --mesh"],
        ),
        (
            "predict",
            2**30,
            "RESOURCE_EXHAUSTED: of 15.75G",
            ["does not fit on the device", "evaluation.batch_size"],
        ),
    ],
)
def test_what_does_not_fit_is_told_by_how_much_and_what_helps(step, held, error, words):
    message = target.too_large(
        target.largest_size(error), "v5e:2x2", CHIPS["v5e"], held, step
    )
    assert message.startswith("--topology=v5e:2x2: the step does not fit")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("estimate", "shown"),
    [(0.1, "108.0 ms, at least 68.0 ms"), (None, "at least 68.0 ms")],
)
def test_communication_that_does_not_overlap_adds_to_the_time(estimate, shown):
    """All-gathers send 1,000 bytes, of these 750 while the device computes.

    The all-reduces do not overlap.
    """
    sent = [
        Collective("all-gather", 8, 4, 0, 1_000, 1, 750),
        Collective("all-reduce", 8, 5, 0, 1_750),
    ]
    found = target.Target(
        *("v5e:2x4", {"data": 8}, "train", 1, 1, {}, 1, 8.0, 0, 0, 0, 1, 0.0),
        step_time=StepTime({"loss": Time(estimate, 0.06)}, 0, 0.0, 0),
        collectives=sent,
        turns=1,
    )
    rows = dict(target.table_rows(found, CHIPS["v5e"], link=250_000))
    assert (
        rows["communication at 0.00025 GB/s (estimate)"]
        == "11 ms, 3 ms of it during computations"
    )
    assert rows["time with communication (estimate)"] == shown
