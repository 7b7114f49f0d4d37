"""A disk that fails once: whichever call of a save, a restore or a start fails,
nothing intact is removed.
"""

import dataclasses
import errno
import gc
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from helpers.disks import Disk
from helpers.runs import small
from transformer_jax import workdir as workdirs
from transformer_jax.errors import UserError
from transformer_jax.training import lock
from transformer_jax.training.checkpoint import CheckpointConfig, Checkpoints
from transformer_jax.training.logging import MetricsWriter, read_rows
from transformer_jax.training.metric import LOSS

CONFIG = CheckpointConfig(every=10, keep_latest=3, keep_best=1)
METRICS = {"loss": LOSS}
PRUNING = dataclasses.replace(CONFIG, keep_latest=1)
INTACT = (10, 20)


def state_at(step: int) -> dict:
    return {"step": jnp.int32(step), "params": {"w": jnp.arange(7.0) * step}}


def config_of(folder: pathlib.Path) -> ConfigDict:
    return workdirs.read(folder)


def start(workdir: pathlib.Path, config: ConfigDict) -> int | None:
    """Do what a start does with the files of a workdir, and return the step that it
    continues from.
    """
    with lock.held(workdir):
        workdirs.claim(workdir, config)
        checkpoints = Checkpoints(workdir / "checkpoints", CONFIG, METRICS)
        try:
            newest = checkpoints.newest()
            if newest is not None:
                restored, _ = checkpoints.restore(
                    newest, jax.eval_shape(lambda: state_at(newest))
                )
                assert np.array_equal(restored["params"]["w"], np.arange(7.0) * newest)
            checkpoints.discard_after(newest)
            MetricsWriter(workdir, newest or 0).close()
        finally:
            checkpoints.close()
    return newest


def save(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Save step 30, after which step 20 is no longer kept."""
    checkpoints = Checkpoints(workdir / "checkpoints", PRUNING, METRICS)
    try:
        checkpoints.save(30, state_at(30), {"position": 30}, {"loss": 30.0})
    finally:
        checkpoints.close()


def restore_best(workdir: pathlib.Path, config: ConfigDict) -> None:
    checkpoints = Checkpoints(workdir / "checkpoints", CONFIG, METRICS)
    try:
        best = checkpoints.best()
        assert best == 10, "a step whose score could not be read is not worse"
        checkpoints.restore(best, jax.eval_shape(lambda: state_at(best)))
    finally:
        checkpoints.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> pathlib.Path:
    """A workdir with the steps 10 (the best) and 20, a tokenizer and rows, and the
    rest of an unfinished save.
    """
    workdir = tmp_path_factory.mktemp("original") / "run"
    workdirs.claim(workdir, small("sequence_to_sequence", "corpus"))
    (workdir / "tokenizer.json").write_text("{}")
    (workdir / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "split": "train"}}\n' for i in range(1, 21))
    )
    checkpoints = Checkpoints(workdir / "checkpoints", CONFIG, METRICS)
    for step in INTACT:
        checkpoints.save(
            step, state_at(step), {"position": step}, {"loss": float(step)}
        )
    checkpoints.close()
    shutil.copytree(workdir / "checkpoints" / "20", workdir / "checkpoints" / "25")
    (workdir / "checkpoints" / "25" / "manifest.json").unlink()
    return workdir


def assert_nothing_lost(workdir: pathlib.Path, what: str) -> None:
    checkpoints = Checkpoints(workdir / "checkpoints", CONFIG, METRICS)
    verified = set(checkpoints.verified())
    checkpoints.close()
    assert set(INTACT) <= verified or verified == {10, 30}, (
        f"{what}: a checkpoint is lost, {verified} are left"
    )
    assert (workdir / "tokenizer.json").read_text() == "{}", (
        f"{what}: the tokenizer is lost"
    )
    assert len(read_rows(workdir / "metrics.jsonl")) == 20, f"{what}: rows are lost"
    assert (workdir / "config.json").exists(), f"{what}: the config is lost"


def raised(action, workdir: pathlib.Path, config: ConfigDict) -> Exception | None:
    try:
        action(workdir, config)
    except AssertionError:
        raise
    except Exception as error:
        return error
    return None


ALL = [
    pytest.param(number, 1, marks=pytest.mark.slow, id=errno.errorcode[number])
    for number in (errno.EIO, errno.ESTALE, errno.EACCES)
]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning"
)
@pytest.mark.parametrize(
    ("number", "stride"), [pytest.param(errno.EIO, 11, id="some EIO"), *ALL]
)
@pytest.mark.parametrize("action", [start, save, restore_best])
def test_each_call_fails_once_and_nothing_intact_is_removed(
    original, tmp_path, action, number, stride
):
    config = config_of(original)
    whole = pathlib.Path(shutil.copytree(original, tmp_path / "whole"))
    with Disk(whole).mounted() as disk:
        action(whole, config)
    assert disk.count > 20
    refused, numbers = 0, range(1, disk.count + 1, stride)
    for fail_at in numbers:
        workdir = pathlib.Path(shutil.copytree(original, tmp_path / f"run{fail_at}"))
        with Disk(workdir, number, fail_at).mounted() as faulty:
            error = raised(action, workdir, config)
        refused += error is not None
        if number != errno.EACCES:
            assert not isinstance(error, UserError), (
                f"{faulty.failed}: a restart may help, but {error!r}"
            )
        assert_nothing_lost(workdir, f"{action.__name__}, {faulty.failed}")
        # If removing the lock failed, the next run takes it over once this process has
        # ended.
        (workdir / lock.NAME).unlink(missing_ok=True)
        newest = start(workdir, config)
        assert newest in (20, 30), faulty.failed
        if action is start:
            assert newest == 20, faulty.failed
        shutil.rmtree(workdir)
    assert refused > len(numbers) / 2, "most failures are reported"
    gc.collect()  # coroutines that Orbax leaves behind after an error


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning"
)
@pytest.mark.parametrize("action", [save, restore_best])
def test_a_step_whose_score_cannot_be_read_is_not_worse(original, tmp_path, action):
    config, score = config_of(original), "/10/meta/meta.json"
    whole = pathlib.Path(shutil.copytree(original, tmp_path / "whole"))
    with Disk(whole, path=score).mounted() as disk:
        action(whole, config)
    assert disk.count > 0
    for fail_at in range(1, disk.count + 1):
        workdir = pathlib.Path(shutil.copytree(original, tmp_path / f"run{fail_at}"))
        with Disk(workdir, fail_at=fail_at, path=score).mounted() as faulty:
            raised(action, workdir, config)
        assert_nothing_lost(workdir, f"{action.__name__}, {faulty.failed}")
    gc.collect()  # coroutines that Orbax leaves behind after an error
