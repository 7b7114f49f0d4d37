"""Settings of JAX that a run is continued with."""

import jax
import pytest

from helpers.runs import run
from transformer_jax.errors import UserError
from transformer_jax.training import settings


def test_settings_of_jax_that_change_the_run_are_refused(
    finished, copied, monkeypatch, caplog
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    run(finished[0], copied)
    assert "the run continues with other rounding" in caplog.text
    with (
        jax.threefry_partitionable(False),
        pytest.raises(UserError, match="jax_threefry_partitionable = False, but"),
    ):
        run(finished[0], copied)


@pytest.mark.parametrize(
    ("name", "value"), [("jax_enable_x64", True), ("jax_default_prng_impl", "rbg")]
)
def test_other_types_and_random_numbers_are_refused(name, value):
    stored, before = settings.current(), getattr(jax.config, name)
    settings.check(stored, settings.current(), "step 8")
    jax.config.update(name, value)
    try:
        now = settings.current()
    finally:
        jax.config.update(name, before)
    with pytest.raises(UserError, match=f"{name} = {value!r}, but {before!r} when"):
        settings.check(stored, now, "step 8")
