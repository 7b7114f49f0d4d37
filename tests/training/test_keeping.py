"""Steps that are saved when a run is interrupted."""

import itertools
import shutil
import signal

import pytest

from helpers.runs import rows, run
from transformer_jax.config import parse
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training.checkpoint import Checkpoints, parameters_sha256
from transformer_jax.training.engine import Engine
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.keeping import Preempted


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise KeyboardInterrupt.

    Background jobs of a shell ignore it otherwise.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_run_asked_to_stop_saves_and_goes_on(
    finished, tmp_path, monkeypatch, caplog, number
):
    """SIGTERM or Ctrl-C between two saves saves the step.

    Later, this step is neither averaged nor kept.
    """
    config, _, hashes = finished
    init = Engine.__init__

    def at_step_3(engine, *arguments):
        init(engine, *arguments)
        compiled, count = engine.step, itertools.count(1)

        def counted(*inputs):
            if next(count) == 3:
                signal.raise_signal(number)
            return compiled(*inputs)

        counted._cache_size, counted.lower = compiled._cache_size, compiled.lower
        engine.step = counted

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "__init__", at_step_3)
        with pytest.raises(Preempted, match="stopped after step 3, which is saved"):
            run(config, tmp_path)
    assert signal.getsignal(number) is before
    assert ("press Ctrl-C again to stop immediately" in caplog.text) == (
        number == signal.SIGINT
    )
    saved = tmp_path / "checkpoints"
    assert sorted(int(path.name) for path in saved.iterdir()) == [2, 3]
    resumed = run(config, tmp_path)
    assert parameters_sha256(resumed) == hashes["state"]
    assert sorted(int(path.name) for path in saved.iterdir()) == [2, 4, 6, 8]


def row_values(workdir):
    """Return the rows of a run without what is measured, e.g. its speed."""
    kept = ("step", "split", "loss", "gradient_norm", "bleu")
    return [{key: row.get(key) for key in kept} for row in rows(workdir)]


@pytest.mark.parametrize("step", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_asked_to_stop_during_an_evaluation_saves_first(
    finished, tmp_path, monkeypatch, step
):
    """Nothing shows afterwards: parameters, rows, scores and steps are those of a
    run never stopped.
    """
    config, workdir, hashes = finished
    feed, evaluations = Evaluator._feed, itertools.count(1)

    def interrupted(evaluator, batches):
        if next(evaluations) == step // config.training.evaluate_every:
            signal.raise_signal(signal.SIGTERM)
        yield from feed(evaluator, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_feed", interrupted)
        with pytest.raises(
            Preempted, match=f"stopped after step {step}, which is saved"
        ):
            run(config, tmp_path)
    assert [row["step"] for row in rows(tmp_path) if row["split"] == "val"][
        -1
    ] == step - 2
    assert parameters_sha256(run(config, tmp_path)) == hashes["state"]
    assert row_values(tmp_path) == row_values(workdir)
    one, other = (
        Checkpoints(
            folder / "checkpoints",
            parse(config).checkpoint,
            SequenceToSequence.metrics,
        )
        for folder in (tmp_path, workdir)
    )
    assert one.verified() == other.verified()
    assert [one.scores(at) for at in one.verified()] == [
        other.scores(at) for at in one.verified()
    ]
    assert one.latest(9) == other.latest(9)


def test_killed_in_the_middle_of_a_save(finished, copied, caplog):
    """The unfinished step is skipped with a warning.

    Rows of steps that are trained again are removed.
    """
    config, _, hashes = finished
    for step in (6, 8):
        shutil.rmtree(copied / "checkpoints" / str(step))
    (copied / "checkpoints" / "4" / "manifest.json").unlink()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "spl')
    resumed = run(config, copied)
    assert "skipping checkpoint" in caplog.text
    assert "resumed from step 2" in caplog.text
    assert "skipped an invalid line" in caplog.text
    assert parameters_sha256(resumed) == hashes["state"]
    assert [row["step"] for row in rows(copied)] == [2, 2, 4, 4, 6, 6, 8, 8]
