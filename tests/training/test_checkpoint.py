import errno
import hashlib
import json
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils

import transformer_jax
from helpers.runs import run
from transformer_jax.training import manifest
from transformer_jax.training.checkpoint import (
    CheckpointConfig,
    CheckpointError,
    Checkpoints,
    check_fingerprint,
    parameters_sha256,
)
from transformer_jax.training.metric import LOSS, Metric

METRICS = {
    "loss": LOSS,
    "bleu": Metric("bleu", better="higher"),
    "word_error_rate": Metric("word_error_rate", better="lower"),
}


def make_config(**changes) -> CheckpointConfig:
    return CheckpointConfig(
        **{"every": 10, "keep_latest": 9, "keep_best": 0, "best_metric": "loss"}
        | changes
    )


def make_state(seed: int = 0, width: int = 5) -> dict:
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "decoder": {
            "kernel": jax.random.normal(keys[0], (7, width)),
            "scale": jnp.full((3,), -0.0),
        },
        "embedding": jax.random.normal(keys[1], (11, 2), jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    _, opt_state = optimizer.update(params, optimizer.init(params))
    return {"step": jnp.int32(seed), "params": params, "opt_state": opt_state}


def abstract(tree):
    return jax.eval_shape(lambda: tree)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def opened(tmp_path):
    """Yield a function that opens Checkpoints like a new process.

    They are closed after the test.
    """
    all_opened = []

    def open_checkpoints(directory=tmp_path / "checkpoints", **changes) -> Checkpoints:
        all_opened.append(Checkpoints(directory, make_config(**changes), METRICS))
        return all_opened[-1]

    yield open_checkpoints
    for checkpoints in all_opened:
        checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> pathlib.Path:
    """Folder with steps 10 and 20. Copy it before changing it."""
    directory = tmp_path_factory.mktemp("two_steps")
    checkpoints = Checkpoints(directory, make_config(), METRICS)
    for step in (10, 20):
        checkpoints.save(step, make_state(step), {"position": step}, {"loss": 1 / step})
    checkpoints.close()
    return directory


@pytest.fixture
def damageable(two_steps, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


def test_restores_every_bit_the_structure_and_the_meta(opened):
    state = make_state(3)
    opened().save(10, state, {"position": 4, "name": "é"}, {"loss": np.float32(0.5)})
    restored, meta = opened().restore(10, abstract(state))
    assert_same_bits(restored, state)
    assert meta == opened().meta(10) == {"position": 4, "name": "é"}


def test_restores_the_parameters_without_knowing_the_optimizer(opened):
    state = make_state(3)
    opened().save(10, state, {})
    params = opened().restore_params(10, abstract(state["params"]))
    assert_same_bits(params, state["params"])
    assert parameters_sha256(params) == parameters_sha256(state["params"])


def test_restores_onto_the_sharding_asked_for(opened):
    state = {"params": {"w": jnp.arange(8.0)}}
    opened().save(10, state, {})
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    wanted = {
        "params": {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    }
    restored, _ = opened().restore(10, wanted)
    assert restored["params"]["w"].sharding == sharding


def test_an_untouched_step_verifies(two_steps, opened, caplog):
    checkpoints = opened(two_steps)
    assert checkpoints.verified() == [10, 20]
    assert checkpoints.newest() == 20
    assert not caplog.records


def delete(path: pathlib.Path):
    path.unlink()


def truncate(path: pathlib.Path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: pathlib.Path):
    path.write_bytes(b"")


def flip_one_bit(path: pathlib.Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [delete, truncate, empty, flip_one_bit])
def test_damage_to_any_file_is_noticed(damageable, opened, caplog, damage):
    checkpoints = opened()
    files = [path for path in (damageable / "20").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        damage(path)
        caplog.clear()
        assert checkpoints.verified() == [10], path
        (record,) = caplog.records
        assert str(damageable / "20") in record.getMessage()
        assert str(path.relative_to(damageable / "20")) in record.getMessage()
        with pytest.raises(
            CheckpointError, match=r"20 cannot be restored: .*Use another step.*\[10\]"
        ):
            checkpoints.restore(20, abstract(make_state()))
        path.write_bytes(content)
    assert checkpoints.verified() == [10, 20]


def test_a_flipped_bit_of_the_manifest_is_noticed(damageable, opened):
    manifest = damageable / "20" / "manifest.json"
    content = manifest.read_bytes()
    for number, at in enumerate(range(0, len(content), 29)):
        bit = number % 8
        manifest.write_bytes(
            content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]
        )
        # white space that becomes other white space is harmless
        if opened().newest() != 10:
            assert chr(content[at]).isspace(), (at, bit)


def test_folders_that_are_no_finished_step_are_passed_over(damageable, opened, caplog):
    (damageable / "30").mkdir()
    shutil.copytree(
        damageable / "20",
        damageable / "40",
        ignore=shutil.ignore_patterns("manifest.json"),
    )
    shutil.copytree(damageable / "20", damageable / "50.orbax-checkpoint-tmp")
    (damageable / "notes").mkdir()
    assert opened().newest() == 20
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("manifest.json is missing" in message for message in messages)


def test_a_file_that_cannot_be_read_is_damage(damageable, opened, monkeypatch, caplog):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_sha256", fail)
        assert opened().verified() == []
        assert "cannot be read" in caplog.text
        with pytest.raises(
            OSError, match=r"20: it cannot be read \(.*may be intact: check the disk"
        ):
            opened().newest()
    assert opened().newest() == 20


def test_restoring_a_missing_step_names_those_there_are(two_steps, opened):
    with pytest.raises(CheckpointError, match=r"there is no such step.*\[10, 20\]"):
        opened(two_steps).restore_params(15, abstract(make_state()["params"]))


def test_an_empty_or_missing_directory_has_no_steps(opened, tmp_path):
    checkpoints = opened()
    assert (checkpoints.verified(), checkpoints.newest(), checkpoints.best()) == (
        [],
        None,
        None,
    )
    assert not (tmp_path / "checkpoints").exists(), "reading must leave nothing behind"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["decoder"].update(kernel=jnp.zeros((7, 6))),
            r"kernel: stored float32\[7, 5\], .*\[7, 6\]",
        ),
        (
            lambda p: p["decoder"].update(kernel=jnp.zeros((7, 5), jnp.int32)),
            r"float32\[7, 5\], expected int32",
        ),
        (
            lambda p: p.update(head=jnp.zeros(2)),
            r"params/head: stored nothing, expected float32\[2\]",
        ),
        (
            lambda p: p.pop("embedding"),
            r"params/embedding: stored bfloat16\[11, 2\], expected nothing",
        ),
    ],
)
def test_another_model_is_refused_by_name(two_steps, opened, change, message):
    state = make_state()
    change(state["params"])
    with pytest.raises(CheckpointError, match=message) as full:
        opened(two_steps).restore(20, abstract(state))
    with pytest.raises(CheckpointError, match=message):
        opened(two_steps).restore_params(20, abstract(state["params"]))
    assert "1 of " in str(full.value)
    assert "Use the config that it was trained with" in str(full.value)


def test_another_optimizer_is_refused_by_name(two_steps, opened):
    state = make_state()
    state["opt_state"] = optax.sgd(0.1, momentum=0.9).init(state["params"])
    with pytest.raises(
        CheckpointError, match=r"opt_state/0/trace/decoder/kernel: stored nothing.*"
    ):
        opened(two_steps).restore(20, abstract(state))


def test_saving_a_step_twice_is_an_error(damageable, opened):
    with pytest.raises(CheckpointError, match=r"20 already exists.*discard_after"):
        opened().save(20, make_state(), {})
    restored, _ = opened().restore(20, abstract(make_state()))
    assert int(restored["step"]) == 20


def test_a_directory_that_cannot_be_made(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError,
        match=r"step 10 was not saved in .*file/checkpoints \(there is no earlier",
    ):
        opened(tmp_path / "file" / "checkpoints").save(10, make_state(), {})


@pytest.mark.parametrize(
    ("owner", "name"),
    [(ocp.PyTreeCheckpointHandler, "finalize"), (manifest.os, "fsync")],
)
def test_a_full_disk_loses_no_earlier_step(
    damageable, opened, monkeypatch, owner, name
):
    def full_disk(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full_disk)
        with pytest.raises(
            CheckpointError,
            match=r"step 30 was not saved .*valid step is 20.*No space left",
        ):
            opened(keep_latest=1).save(30, make_state(), {})
    checkpoints = opened(keep_latest=1)
    assert checkpoints.verified() == [10, 20]
    checkpoints.discard_after(20)
    assert sorted(path.name for path in damageable.iterdir()) == ["10", "20"]
    checkpoints.save(30, make_state(30), {})
    assert checkpoints.verified() == [30]


def test_a_kill_before_the_manifest_leaves_the_earlier_step(
    damageable, opened, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(folder):
        raise Killed

    checkpoints = opened(keep_latest=1)
    monkeypatch.setattr(manifest, "write", killed)
    with pytest.raises(Killed):
        checkpoints.save(30, make_state(30), {})
    assert (damageable / "30").is_dir()
    assert opened().newest() == 20


def test_discard_after_lets_the_steps_be_saved_again(damageable, opened, caplog):
    for step in (30, 40):
        shutil.copytree(damageable / "20", damageable / str(step))
    flip_one_bit(damageable / "10" / "meta" / "meta.json")
    (damageable / "30" / "manifest.json").unlink()
    (damageable / "15.orbax-checkpoint-tmp").mkdir()
    (damageable / "notes").mkdir()
    checkpoints = opened()
    # makes Orbax list the steps
    checkpoints.restore_params(40, abstract(make_state()["params"]))
    checkpoints.discard_after(20)
    assert sorted(path.name for path in damageable.iterdir()) == [
        "10",
        "20",
        "40.set-aside",
        "notes",
    ]
    assert caplog.text.count("training continues from step 20") == 1
    assert caplog.text.count("it was not saved completely") == 2
    state = make_state(7)
    checkpoints.save(30, state, {})
    assert sorted(path.name for path in damageable.iterdir()) == [
        "10",
        "20",
        "30",
        "notes",
    ]
    checkpoints.save(40, state, {})
    assert checkpoints.verified() == [20, 30, 40]
    assert checkpoints.verified([10, 30]) == [30]
    assert_same_bits(checkpoints.restore(30, abstract(state))[0], state)


@pytest.mark.parametrize(
    ("metric", "best"), [("loss", 20), ("bleu", 30), ("word_error_rate", 10)]
)
def test_keeps_the_latest_and_the_best_across_restarts(opened, metric, best):
    scores = {
        10: {"loss": 3.0, "bleu": 1.0, "word_error_rate": 0.2},
        20: {"loss": 1.0, "bleu": 2.0, "word_error_rate": 0.9},
        30: {"loss": 2.0, "bleu": 9.0, "word_error_rate": 0.3},
        40: dict.fromkeys(METRICS, float("nan")),
        50: None,
        60: {"accuracy": 1.0},
    }
    for step, metrics in scores.items():  # open anew for every step, like a new process
        opened(keep_latest=2, keep_best=1, best_metric=metric).save(
            step, make_state(), {}, metrics
        )
    checkpoints = opened(best_metric=metric)
    assert checkpoints.verified() == [best, 50, 60]
    assert checkpoints.best() == best


def test_the_latest_are_not_filled_up_with_what_is_kept_for_its_score(opened, tmp_path):
    options = {"keep_latest": 2, "keep_best": 1}
    for step, loss in [(10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]:
        opened(**options).save(
            step, make_state(), {}, {"loss": loss}, preemption=step == 20
        )
    checkpoints = opened(**options)
    assert checkpoints.verified() == [10, 30, 40]
    assert (checkpoints.latest(1), checkpoints.latest(2)) == ([40], [30, 40])


def test_a_save_leaves_the_counter_of_the_preemption_service_alone(opened, monkeypatch):
    calls = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", calls.append)
    opened().save(10, make_state(), {}, {"loss": 1.0})
    assert calls == []


def test_the_newer_of_equal_scores_is_best(opened):
    checkpoints = opened(keep_best=1)
    for step in (10, 20):
        checkpoints.save(step, make_state(), {}, {"loss": 1.0})
    assert checkpoints.best() == 20


def test_a_score_that_is_not_a_number_is_never_best(opened):
    for step, loss in [
        (10, float("nan")),
        (20, 1.0),
        (30, float("inf")),
        (40, float("nan")),
    ]:
        opened().save(step, make_state(), {}, {"loss": loss})
    assert opened().best() == 20


def test_a_damaged_step_is_not_the_best(damageable, opened):
    assert opened().best() == 20
    flip_one_bit(damageable / "20" / "state" / "manifest.ocdbt")
    assert opened().best() == 10


def test_average_is_the_mean_in_float32(opened):
    checkpoints = opened()
    states = [make_state(seed) for seed in (1, 2, 3)]
    for step in (2, 0, 1):  # by itself, Orbax would skip a step older than the newest
        checkpoints.save(step, states[step], {})
    mean = checkpoints.average([0, 1, 2], abstract(states[0]["params"]))
    for name in ("decoder", "embedding"):
        leaves = [jax.tree.leaves(state["params"][name])[0] for state in states]
        expected = np.mean([np.asarray(leaf, np.float64) for leaf in leaves], axis=0)
        actual = jax.tree.leaves(mean[name])[0]
        assert actual.dtype == leaves[0].dtype
        tolerance = 1e-2 if actual.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance
        )
    assert_same_bits(
        checkpoints.average([1], abstract(states[1]["params"])), states[1]["params"]
    )


def test_average_of_no_step_is_an_error(two_steps, opened):
    with pytest.raises(CheckpointError, match="at least one step"):
        opened(two_steps).average([], abstract(make_state()["params"]))


def test_parameters_sha256_is_over_the_bytes_in_tree_order():
    params = {
        "b": jnp.arange(3, dtype=jnp.int32),
        "a": {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])},
    }
    by_hand = (
        np.array([1, 2, 3, 4], "<f4").tobytes() + np.array([0, 1, 2], "<i4").tobytes()
    )
    assert parameters_sha256(params) == hashlib.sha256(by_hand).hexdigest()
    transposed = {"b": params["b"], "a": {"w": np.asarray(params["a"]["w"]).T}}
    assert parameters_sha256(transposed) != parameters_sha256(params)


def test_orbax_is_quiet(opened, capfd, monkeypatch):
    absl = logging.getLogger("absl")
    monkeypatch.setattr(absl, "level", logging.INFO)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    absl.addHandler(handler)
    try:
        opened().save(10, make_state(), {})
        opened().restore(10, abstract(make_state()))
    finally:
        absl.removeHandler(handler)
    assert not records
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("every", 0, "at least 1"),
        ("keep_latest", 0, "at least 1"),
        ("keep_best", -1, "at least 0"),
        ("best_metric", "", "must name"),
    ],
)
def test_config_problems(field, value, message):
    assert not list(make_config().problems())
    ((name, rule),) = make_config(**{field: value}).problems()
    assert name == field
    assert message in rule


def test_checkpoints_belong_to_their_tokenizers():
    meta = {"fingerprint": {"source tokenizer": "a" * 64, "training data": "b" * 64}}
    check_fingerprint({"source tokenizer": "a" * 64}, meta, "run")
    with pytest.raises(
        CheckpointError,
        match=r"training data: sha256 cccccccccccc… here, bbbbbbbbbbbb… .* of run",
    ):
        check_fingerprint(
            {"source tokenizer": "a" * 64, "training data": "c" * 64}, meta, "run"
        )
    with pytest.raises(
        CheckpointError, match=r"target tokenizer: .* none in the checkpoints of run"
    ):
        check_fingerprint({"target tokenizer": "a" * 64}, meta, "run")


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
