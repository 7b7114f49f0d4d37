"""Requests to stop while a run compiles."""

import contextlib
import signal
import threading
import types

import pytest

from helpers.runs import run
from transformer_jax.training import compilations, loop, signals
from transformer_jax.training.keeping import Preempted


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise KeyboardInterrupt.

    Background jobs of a shell ignore it otherwise.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("without_search")
def test_a_run_asked_to_stop_while_it_compiles_does_not_wait(
    tiny, tmp_path, monkeypatch
):
    """Later steps have another shape.

    Its compilation takes long, and the step before is saved meanwhile.
    """
    compile_unless, ended, waited = compilations.compile_unless, threading.Event(), []

    def slow(stop, lowered):
        signal.raise_signal(signal.SIGTERM)
        compile_unless(
            stop, types.SimpleNamespace(compile=lambda: waited.append(ended.wait(300)))
        )

    take = compilations.Compilations.compile

    def always_new(compiled, state, batch, stop):
        if int(state.step) == 3:
            monkeypatch.setattr(compilations, "compile_unless", slow)
            compiled._compiled.clear()
        return take(compiled, state, batch, stop)

    monkeypatch.setattr(compilations.Compilations, "compile", always_new)
    with pytest.raises(Preempted, match="stopped after step 3, which is saved"):
        run(tiny, tmp_path / "run")
    assert not waited
    ended.set()
    monkeypatch.undo()
    assert int(run(tiny, tmp_path / "run").step) == 4


@pytest.mark.usefixtures("interruptible", "without_search")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_run_asked_to_stop_before_its_first_step_takes_none(
    tiny, tmp_path, monkeypatch, number
):
    compile_ahead = loop.compiling_ahead

    @contextlib.contextmanager
    def asked_meanwhile():
        with compile_ahead() as submit:
            yield submit
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "compiling_ahead", asked_meanwhile)
        with pytest.raises(signals.Stopped, match=signal.Signals(number).name):
            run(tiny, tmp_path / "run")
    assert not any((tmp_path / "run" / "checkpoints").glob("*"))
    assert int(run(tiny, tmp_path / "run").step) == 4
