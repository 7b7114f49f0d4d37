"""Training runs: they learn, report, and continue bitwise after any interruption."""

import contextlib
import itertools
import json
import pathlib
import shutil
import signal
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import transformer_jax
from helpers.corpus import write_corpus
from helpers.runs import rows, run, small
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.errors import UserError
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training import (
    compilations,
    divergence,
    loop,
    reporting,
    settings,
    signals,
)
from transformer_jax.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    parameters_sha256,
)
from transformer_jax.training.divergence import Diverged
from transformer_jax.training.engine import Engine
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.keeping import Preempted
from transformer_jax.training.location import Moved
from transformer_jax.training.loop import train
from transformer_jax.training.optimizer import schedule as make_schedule
from transformer_jax.training.sharding import MeshConfig, feed, make_mesh
from transformer_jax.training.task import Mean
from transformer_jax.workdir import claim


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Config, workdir and last state of a run of 8 steps.

    Copy the workdir before changing it.
    """
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder / "corpus")
    config = small("sequence_to_sequence", folder / "corpus")
    config.training.steps, config.training.microbatches = 8, 2
    return config, folder / "run", run(config, folder / "run")


@pytest.fixture
def copied(finished, tmp_path):
    """Copy of the finished workdir."""
    return pathlib.Path(shutil.copytree(finished[1], tmp_path / "run"))


def test_training_learns_and_leaves_what_it_should(tiny, tmp_path, caplog):
    tiny.optimizer.schedule, tiny.optimizer.learning_rate = "constant", 1e-2
    tiny.training.evaluate_every = tiny.checkpoint.every = tiny.training.log_every = 20
    run(tiny, tmp_path / "run", training__steps=40)
    train_rows = [row for row in rows(tmp_path / "run") if row["split"] == "train"]
    val_rows = [row for row in rows(tmp_path / "run") if row["split"] == "val"]
    assert (
        [row["step"] for row in train_rows]
        == [row["step"] for row in val_rows]
        == [20, 40]
    )
    assert val_rows[1]["loss"] < val_rows[0]["loss"] < np.log(304)
    assert {"loss", "learning_rate", "tokens_per_s"} <= set(train_rows[0])
    assert {
        "loss",
        "perplexity",
        "bleu",
        "bleu_signature",
        "bleu_tokenized",
        "examples",
    } <= set(val_rows[0])
    assert val_rows[0]["examples"] == 11
    assert "step 40/40  loss" in caplog.text
    assert "compiling the training step for batches of" in caplog.text
    names = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
    assert names == {"config", "made", "metrics", "events", "tokenizer", "checkpoints"}


def test_resumed_run_is_bitwise_the_run_never_stopped(finished, tmp_path, caplog):
    config, workdir, whole = finished
    run(config, tmp_path, training__steps=2)
    resumed = run(config, tmp_path)
    assert "resumed from step 2" in caplog.text
    assert parameters_sha256(resumed) == parameters_sha256(whole)
    kept = ("step", "split", "loss", "gradient_norm", "bleu")
    strip = [
        [{key: row.get(key) for key in kept} for row in rows(folder)]
        for folder in (workdir, tmp_path)
    ]
    assert strip[0] == strip[1]


@pytest.mark.usefixtures("without_search")
def test_rows_have_the_steps_own_loss_and_the_mean_since_the_last(
    tiny, tmp_path, monkeypatch
):
    """Rows also have every other mean of the task, including those that are not part
    of the objective.
    """
    loss = SequenceToSequence.loss

    def with_another(self, params, batch, key, step):
        return {
            **loss(self, params, batch, key, step),
            "before": Mean(5.0 * step, 5.0, scale=0),
        }

    monkeypatch.setattr(SequenceToSequence, "loss", with_another)
    for every in (1, 2):
        tiny.training.log_every = every
        run(tiny, tmp_path / str(every), training__steps=4)
    each, pairs = (
        {row["step"]: row for row in rows(tmp_path / name) if row["split"] == "train"}
        for name in ("1", "2")
    )
    assert sorted(pairs) == [2, 4]
    for step, row in pairs.items():
        before, own = each[step - 1]["loss"], each[step]["loss"]
        assert row["loss"] == own == each[step]["mean_loss"]
        assert min(before, own) < row["mean_loss"] < max(before, own)
        assert row["before"] == step - 1


def test_an_unknown_score_cannot_be_the_best(tiny, tmp_path):
    tiny.checkpoint.best_metric = "belu"
    with pytest.raises(
        ConfigError,
        match=r"best_metric = 'belu': must be one of .* loss, .*\(did you mean bleu\?",
    ):
        run(tiny, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_search")
def test_ready_is_called_when_a_run_can_begin(tiny, tmp_path):
    told = []
    engine = Engine(make_task(parse(tiny), tmp_path))
    train(engine, tmp_path, ready=lambda: told.append("ready"))
    assert told == ["ready"]
    tiny.data.directory = str(tmp_path / "none")
    with pytest.raises(ValueError, match="There is no directory"):
        train(
            Engine(make_task(parse(tiny), tmp_path)),
            tmp_path,
            ready=lambda: told.append("again"),
        )
    assert told == ["ready"]


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
    config, _, whole = finished
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
    assert parameters_sha256(resumed) == parameters_sha256(whole)
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
    config, workdir, whole = finished
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
    assert parameters_sha256(run(config, tmp_path)) == parameters_sha256(whole)
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


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize("removed", [False, True])
def test_a_workdir_that_is_moved_while_it_trains(tiny, tmp_path, monkeypatch, removed):
    """A renamed one gets the last step; a removed one cannot."""
    add = reporting.Report.add

    def move(report, step, metrics, work):
        add(report, step, metrics, work)
        if step == 3:
            (tmp_path / "run").rename(tmp_path / "renamed")
            if removed:
                shutil.rmtree(tmp_path / "renamed")

    message = (
        "was removed while the run trained, so step 4 is not saved"
        if removed
        else "renamed to .*Step 4 is saved"
    )
    with monkeypatch.context() as patch:
        patch.setattr(reporting.Report, "add", move)
        with pytest.raises(Moved, match=message):
            run(tiny, tmp_path / "run", training__steps=8)
    assert not (tmp_path / "run").exists()
    if not removed:
        assert int(run(tiny, tmp_path / "renamed", training__steps=4).step) == 4


def test_scores_that_do_not_mean_the_same_are_not_compared(finished, copied, caplog):
    """With another tokenizer of BLEU, a score is higher though the model is not better.

    The earlier best step stays.
    """
    config = ConfigDict(finished[0].to_dict())
    config.checkpoint.best_metric = "bleu"
    config.checkpoint.keep_latest = 1
    config.evaluation.bleu_tokenizer = "char"
    run(config, copied, training__steps=10)
    checkpoints = Checkpoints(
        copied / "checkpoints", parse(config).checkpoint, SequenceToSequence.metrics
    )
    assert checkpoints.best() == 10
    assert "evaluation.bleu_tokenizer: '13a', later 'char'" in caplog.text
    assert len(checkpoints.verified()) == 2


def test_changed_validation_data_are_said(finished, copied, corpus, caplog):
    config = ConfigDict(finished[0].to_dict())
    folder = pathlib.Path(
        shutil.copytree(config.data.directory, copied.parent / "corpus2")
    )
    for path in folder.glob("val.*"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    config.data.directory = str(folder)
    run(config, copied, training__steps=8)
    assert "the validation data have changed since step 8 was saved" in caplog.text


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


@pytest.mark.usefixtures("interruptible")
def test_a_background_job_goes_on_ignoring_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.reached(1)


@pytest.mark.usefixtures("interruptible")
def test_the_second_ctrl_c_ends_at_once():
    with signals.StopRequest() as stop:
        assert not stop.reached(1)
        signal.raise_signal(signal.SIGINT)
        assert stop.reached(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("without_search")
def test_a_run_that_diverges_is_stopped(tiny, tmp_path, caplog):
    (
        tiny.optimizer.schedule,
        tiny.optimizer.learning_rate,
        tiny.optimizer.warmup_steps,
    ) = (
        "constant",
        9e37,
        0,
    )
    tiny.checkpoint.keep_best = 0
    tiny.training.evaluate_every = 40
    message = (
        r"step 11 \(epoch 10, batch 0;.* is the 10th consecutive step .*\. There is no"
        r" earlier"
    )
    with pytest.raises(Diverged, match=message):
        run(tiny, tmp_path / "run", training__steps=40)
    assert "step 2 (epoch 1, batch 0; both from 0) skipped: loss nan" in caplog.text
    assert "step 1 (" not in caplog.text
    assert "step 10 is not saved: its loss or gradient is not finite" in caplog.text
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("without_search")
def test_ruined_parameters_are_never_a_checkpoint(tiny, tmp_path):
    """The first update is finite, but ruins the parameters.

    Only the validation loss shows this, or the loss of the next step.
    """
    (
        tiny.optimizer.schedule,
        tiny.optimizer.learning_rate,
        tiny.optimizer.warmup_steps,
    ) = (
        "constant",
        1e30,
        0,
    )
    tiny.training.evaluate_every = tiny.checkpoint.every = tiny.training.log_every = 1
    with pytest.raises(
        Diverged,
        match=r"the validation loss of step 1 is (nan|inf)\. There is no earlier",
    ):
        run(tiny, tmp_path / "run")
    assert not any((tmp_path / "run" / "checkpoints").glob("*"))
    constants = {"parse_constant": lambda word: pytest.fail(f"{word} is not JSON")}
    written = [
        json.loads(line, **constants)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {row["split"]: row["loss"] for row in written}["val"] is None
    with pytest.raises(CheckpointError, match="has no valid checkpoint"):
        transformer_jax.load(tmp_path / "run")


@pytest.mark.usefixtures("without_search")
def test_parameters_that_are_not_finite_are_not_saved(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "not_finite", lambda params: "encoder/kernel")
    with pytest.raises(
        Diverged,
        match=r"the parameters of step 2 are not finite: encoder/kernel\. There is no",
    ):
        run(tiny, tmp_path / "run")
    assert not any((tmp_path / "run" / "checkpoints").glob("*"))


def test_parameters_that_are_not_finite_predict_nothing(finished, monkeypatch):
    restored = Checkpoints.restore_params

    def ruined(*arguments):
        params = restored(*arguments)
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(
            structure, [leaves[0], leaves[1].at[0].set(jnp.nan), *leaves[2:]]
        )

    monkeypatch.setattr(Checkpoints, "restore_params", ruined)
    message = r"step 8 in .*: the parameters are not finite \(.*\), so the run diverged"
    with pytest.raises(CheckpointError, match=message):
        transformer_jax.load(finished[1])


@pytest.mark.usefixtures("without_search")
def test_the_rate_goes_by_the_steps_that_were_not_skipped(tiny, tmp_path, monkeypatch):
    loss = SequenceToSequence.loss

    def broken_at_first(self, params, batch, key, step):
        mean = loss(self, params, batch, key, step)["loss"]
        return {"loss": mean._replace(sum=jnp.where(step < 3, jnp.nan, mean.sum))}

    monkeypatch.setattr(SequenceToSequence, "loss", broken_at_first)
    run(tiny, tmp_path / "run", training__steps=4)
    run(tiny, tmp_path / "run", training__steps=6)
    rates = {
        row["step"]: row["learning_rate"]
        for row in rows(tmp_path / "run")
        if row["split"] == "train"
    }
    schedule = make_schedule(parse(tiny).optimizer, tiny.model.d_model, 6)
    assert [rates[step] for step in (4, 6)] == pytest.approx(
        [float(schedule(n)) for n in (0, 2)]
    )
    assert rates[6] > rates[4]


@pytest.mark.usefixtures("without_search")
def test_a_profile_of_steps_that_do_not_come_is_announced_as_none(
    tiny, tmp_path, caplog
):
    engine = Engine(make_task(parse(tiny), tmp_path / "run"))
    train(engine, tmp_path / "run", trace=range(9, 11))
    assert "no profile: step 9 is not among the remaining steps, 1 to 4" in caplog.text


def test_a_run_loaded_or_asked_wrongly(finished):
    workdir = str(finished[1])
    predictor = transformer_jax.load(workdir)
    for use in (predictor.predict, predictor.attention):
        with pytest.raises(ValueError, match="'ek at' is one record, not a list"):
            use("ek at")
        with pytest.raises(
            ValueError,
            match="record 2 has the fields text: it must have en, and may have de",
        ):
            use(["ek at", {"text": "ek"}])
    message = (
        r"holds parameters of another model.*\n  config.model.norm: 'post' in the"
        r" workdir"
    )
    with pytest.raises(ConfigError, match=message):
        transformer_jax.load(workdir, {"model.norm": "pre"})
    same = transformer_jax.load(workdir, {"model.attention_implementation": "jax"})
    assert same.parameters_sha256 == predictor.parameters_sha256


def test_killed_in_the_middle_of_a_save(finished, copied, caplog):
    """The unfinished step is skipped with a warning.

    Rows of steps that are trained again are removed.
    """
    config, _, whole = finished
    for step in (6, 8):
        shutil.rmtree(copied / "checkpoints" / str(step))
    (copied / "checkpoints" / "4" / "manifest.json").unlink()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "spl')
    resumed = run(config, copied)
    assert "skipping checkpoint" in caplog.text
    assert "resumed from step 2" in caplog.text
    assert "skipped an invalid line" in caplog.text
    assert parameters_sha256(resumed) == parameters_sha256(whole)
    assert [row["step"] for row in rows(copied)] == [2, 2, 4, 4, 6, 6, 8, 8]


def test_a_finished_run_does_nothing_more(finished, copied):
    config, workdir, whole = finished
    assert parameters_sha256(run(config, copied)) == parameters_sha256(whole)
    assert rows(copied) == rows(workdir)


def test_no_good_checkpoint_left_is_an_error(finished, copied):
    for step in (2, 4, 6, 8):
        shutil.rmtree(copied / "checkpoints" / str(step) / "state")
    with pytest.raises(CheckpointError, match=r"has no valid checkpoint left"):
        run(finished[0], copied)
    assert (copied / "checkpoints" / "2").exists()


def test_other_data_or_tokenizer_is_refused(finished, copied, corpus):
    path = copied / "tokenizer.json"
    stored = path.read_text()
    ids = json.loads(stored)
    ids["model"]["merges"].pop()
    path.write_text(json.dumps(ids))
    with pytest.raises(
        CheckpointError, match=r"source tokenizer: sha256 .* they do not match"
    ):
        transformer_jax.load(str(copied))
    path.write_text(stored)
    for language in ("en", "de"):
        with (corpus / f"train.{language}").open("a") as file:
            file.write("ak\n")
    with pytest.raises(CheckpointError, match="training data: sha256"):
        run(finished[0], copied, training__steps=10, data__directory=str(corpus))


def test_a_renamed_checkpoint_is_refused(finished, copied):
    steps = copied / "checkpoints"
    (steps / "8").rename(steps / "44")
    with pytest.raises(
        CheckpointError, match="44 holds step 8: rename the folder to 8"
    ):
        run(finished[0], copied, training__steps=50)
    assert sorted(path.name for path in steps.iterdir()) == ["2", "4", "44", "6"]


def test_a_renamed_checkpoint_is_not_evaluated(finished, copied):
    steps = copied / "checkpoints"
    (steps / "8").rename(steps / "900")
    with pytest.raises(
        CheckpointError, match="900 holds step 8: rename the folder to 8"
    ):
        transformer_jax.load(copied)


def test_evaluation_takes_latest_best_or_average(finished, caplog):
    _, workdir, whole = finished
    load = {
        name: transformer_jax.load(
            str(workdir), {"evaluation.checkpoint": name, "evaluation.average_last": 2}
        )
        for name in ("latest", "best", "average")
    }
    assert "averaging the parameters of steps 6, 8" in caplog.text
    losses = {
        row["step"]: row["loss"] for row in rows(workdir) if row["split"] == "val"
    }
    assert load["latest"].step == load["average"].step == 8
    assert load["best"].step == min(losses, key=lambda step: losses[step])
    assert load["latest"].parameters_sha256 == parameters_sha256(whole.params)
    assert load["average"].parameters_sha256 != load["latest"].parameters_sha256
    first = load["latest"].evaluate("val")
    assert first["loss"] == pytest.approx(losses[8], rel=1e-6)
    assert first["parameters_sha256"] == load["latest"].parameters_sha256


def test_no_such_checkpoint(tiny, tmp_path):
    claim(tmp_path / "run", tiny)
    with pytest.raises(
        CheckpointError, match="has no valid checkpoint: train there first"
    ):
        transformer_jax.load(str(tmp_path / "run"))


def test_one_compilation_for_each_shape(tiny, tmp_path):
    tiny.data.max_buckets, tiny.data.batch_tokens = 3, 256
    task = make_task(parse(tiny), tmp_path / "run")
    batches = task.batches("train", 0)
    engine = Engine(task)
    state = engine.init(jax.random.key(0))
    for fed in feed(batches, range(2 * len(batches.plan)), engine.mesh):
        state, _ = engine.step(state, fed.placed)
    assert 1 < engine.step._cache_size() == len(batches.plan.shapes) <= 3


def test_mesh_must_fit_the_devices():
    with pytest.raises(ValueError, match="needs a multiple of 7 devices and there are"):
        make_mesh(MeshConfig(data=7, fsdp=-1))
    with pytest.raises(ValueError, match="needs exactly 7 devices and there are"):
        make_mesh(MeshConfig(data=7))
