"""Models that do not fit into memory are refused before anything is allocated."""

import math

import pytest

from transformer_jax.config import make_task, parse
from transformer_jax.errors import UserError
from transformer_jax.training import memory
from transformer_jax.training.engine import Engine


def test_a_model_that_cannot_fit_is_refused(tiny, monkeypatch):
    config = parse(tiny)
    state = Engine(make_task(config, None)).abstract_state
    memory.check_fits(config, state)
    monkeypatch.setattr(memory, "_free_memory", lambda: 1000.0)
    with pytest.raises(
        UserError,
        match=r"config.model.d_model = .* parameters. Training needs at least .* GiB",
    ):
        memory.check_fits(config, state)


def test_the_limit_of_a_control_group_counts(tmp_path):
    for name, text in {
        "max": "1000",
        "now": "600",
        "stat": "active_file 50\ninactive_file 100\n",
    }.items():
        (tmp_path / name).write_text(text)
    paths = [tmp_path / name for name in ("max", "now", "stat")]
    assert memory._free_in_group(*paths) == 550
    paths[0].write_text("max\n")
    assert memory._free_in_group(*paths) == math.inf


def test_the_free_memory_of_the_machine(tmp_path):
    (tmp_path / "meminfo").write_text(
        "MemTotal: 9 kB\nMemAvailable: 5 kB\nSwapFree: 2 kB\n"
    )
    assert memory._free_on_machine(tmp_path / "meminfo") == 7 * 1024
    assert memory._free_on_machine(tmp_path / "none") == math.inf


def test_the_size_of_an_allocation_that_failed_is_said():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.\nmore")
    assert memory.exhausted(error).startswith(
        "out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.). "
    )
