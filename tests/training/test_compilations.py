"""Compilations of the training step."""

import jax
import numpy as np

from transformer_jax.training import compilations


def test_more_compilations_than_shapes_are_warned_of(caplog):
    caplog.set_level("INFO", "transformer_jax")
    step = jax.jit(lambda state, batch: state + batch["x"].sum())
    compiled = compilations.Compilations(step, shapes=1)
    batch = {"x": np.zeros((2, 3))}
    assert compiled.compile(0.0, batch)
    step(0.0, batch)
    compiled.check()
    assert not compiled.compile(0.0, batch)
    assert not caplog.records
    step(0, batch)  # a batch of another type compiles again
    for _ in range(2):
        compiled.check()
    (warning,) = caplog.records
    assert (
        warning.getMessage()
        == "compiled the step 2 times for 1 batch shapes: check what else changes"
    )


def test_a_compilation_is_announced_and_counts_in_the_estimate(caplog):
    caplog.set_level("INFO", "transformer_jax")
    step = jax.jit(lambda state, batch: state + batch["x"].sum())
    compiled = compilations.Compilations(step, shapes=4)
    compiled.compile(0.0, {"x": np.zeros((2, 3))})
    assert compiled.left() is None  # the first was compiled ahead
    compiled.compile(0.0, {"x": np.zeros((2, 5))})
    compiled.compile(0.0, {"x": np.zeros((2, 7))})
    assert compiled.left() == sum(compiled._seconds) / 2 > 0  # one is missing
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the training step for batches of x 2 × 5, shape 2 of at most 4",
        "compiling the training step for batches of x 2 × 7, shape 3 of at most 4",
    ]
