"""The folder of a run. It holds one experiment, and only some keys may change."""

import errno
import json
import os
import re
import time
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import transformer_jax
from helpers.runs import other_than, small
from transformer_jax import files
from transformer_jax.config import ConfigError, fields, share
from transformer_jax.tasks import TASKS
from transformer_jax.workdir import check_model, claim, read, settled, store


def changed(config, changes):
    config = ConfigDict(config.to_dict())
    config.update_from_flattened_dict(changes)
    return config


@pytest.fixture
def learned(tiny, tmp_path):
    """Workdir that has checkpoints."""
    claim(tmp_path / "run", tiny)
    (tmp_path / "run" / "checkpoints").mkdir()
    return tmp_path / "run"


def test_it_holds_one_experiment(tiny, learned, caplog):
    assert read(learned).to_dict() == tiny.to_dict()
    free = changed(
        tiny,
        {"training.steps": 9, "data.directory": "elsewhere", "decoding.beam_size": 9},
    )
    claim(learned, free)
    assert "config.training.steps: 4 in the workdir, 9 now" in caplog.text
    assert read(learned).to_dict() == tiny.to_dict()
    store(learned, free)
    assert json.loads((learned / "config.json").read_text())["training"]["steps"] == 9

    other = changed(
        tiny,
        {
            "model.d_model": 32,
            "optimizer.b1": 0.8,
            "training.seed": 1,
            "training.ema_decay": 0.9,
        },
    )
    with pytest.raises(ConfigError) as error:
        claim(learned, other)
    for line in (
        "holds another experiment; choose another --workdir",
        "config.model.d_model: 16 in the workdir, 32 now",
        "config.optimizer.b1",
        "config.training.seed: 0 in the workdir",
        "config.training.ema_decay: 0.0 in the workdir, 0.9 now",
    ):
        assert line in str(error.value)


FREE = {
    *(
        "data.directory",
        "data.validation_split",
        "data.test_split",
        "data.vocabulary",
        "data.meant_for",
    ),
    *(
        "data.validation_stride",
        "training.steps",
        "training.log_every",
        "training.evaluate_every",
        "training.watch_every",
    ),
}
FREE_SECTIONS = ("evaluation", "checkpoint", "decoding", "answers", "mesh")


@pytest.mark.parametrize("task", TASKS)
def test_which_keys_may_change_follows_from_their_fields(task, corpus, tmp_path):
    """Only keys marked as free in their metadata may change: run length, location of
    the data, and scoring.
    """
    config = small(task, corpus)
    claim(tmp_path, config)
    (tmp_path / "checkpoints").mkdir()
    known = fields(task, config.model)
    free = {key for key, field in known.items() if field.metadata.get("free")}
    assert free == {
        key for key in known if key in FREE or key.startswith(FREE_SECTIONS)
    }
    assert len(free) > len(FREE)
    for key in known:
        section, name = key.split(".")
        if key == "model.architecture":
            continue
        other = changed(config, {key: other_than(config[section][name])})
        if key in free:
            claim(tmp_path, other)
        else:
            with pytest.raises(
                ConfigError,
                match=(
                    rf"another --workdir:\n  config\.{key}: .* in the workdir, .* now$"
                ),
            ):
                claim(tmp_path, other)


def test_another_task_is_another_experiment(learned, corpus):
    with pytest.raises(
        ConfigError,
        match=(
            r"config.task: 'sequence_to_sequence' in the workdir, 'classification' now"
        ),
    ):
        claim(learned, small("classification", corpus))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (
            {
                "model.dtype": "bfloat16",
                "model.attention_implementation": "jax",
                "model.remat": "full",
            },
            "",
        ),
        (
            {
                "model.dropout_rate": 0.45,
                "model.attention_dropout_rate": 0.35,
                "training.label_smoothing": 0.3,
            },
            "",
        ),
        (
            {"model.norm": "pre", "model.unroll": 2},
            "\n  config.model.norm: 'post' in the workdir, 'pre' now",
        ),
        ({"model.d_ff": 25}, "\n  config.model.d_ff: 24 in the workdir, 25 now"),
    ],
)
def test_a_run_is_scored_with_its_own_model_however_computed(
    tiny, tmp_path, changes, refused
):
    claim(tmp_path, tiny)
    if not refused:
        check_model(tmp_path, changed(tiny, changes))
        return
    with pytest.raises(
        ConfigError,
        match=f"holds parameters of another model; do not change:{refused}$",
    ):
        check_model(tmp_path, changed(tiny, changes))


def test_missing_keys_have_their_defaults(tiny, learned):
    """A workdir that was made before a key existed uses the default of the key."""
    path = learned / "config.json"
    stored = json.loads(path.read_text())
    del stored["model"]["unroll"], stored["model"]["architecture"], stored["mesh"]
    path.write_text(json.dumps(stored))
    assert read(learned).to_dict() == tiny.to_dict()
    claim(learned, tiny)
    with pytest.raises(
        ConfigError, match=r"config.model.unroll: 1 in the workdir, 2 now"
    ):
        claim(learned, changed(tiny, {"model.unroll": 2}))


def test_labels_are_read_as_they_were_written(corpus, tmp_path):
    """Labels are stored as a JSON list and read as a tuple."""
    config = small("classification", corpus)
    claim(tmp_path, config)
    assert read(tmp_path).data.labels == ("even", "odd")
    assert read(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            "",
            (
                r"config.json: it is damaged \(Expecting value: .*\): restore it, or"
                r" choose another folder"
            ),
        ),
        ("[" * 10**5, r"config.json: it is damaged \(maximum recursion depth exceeded"),
        (
            "[]",
            (
                "config.json: it does not specify a task and a model: "
                "choose the folder of a run, or a new one"
            ),
        ),
        (
            '{"architectures": ["Marian"]}',
            "config.json: it does not specify a task and a model",
        ),
        (
            '{"task": "sequence_to_sequence", "model": 3}',
            "config.json: it does not specify a task and a model",
        ),
        (
            '{"task": "sequence_to_sequence", "model": {"architecture": "perceptron"}}',
            "config.json: config.model.architecture = 'perceptron': must be one of",
        ),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, stored, message):
    (tmp_path / "config.json").write_text(stored)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


# The relevant part of a config.json written by version 0.1.
OLD = {
    "task": "translation",
    "model": {
        "architecture": "transformer",
        "d_model": 16,
        "attention_implementation": "xla",
    },
    "data": {"directory": "data", "max_shapes": 8},
    "optimizer": {"schedule": "paper"},
    "evaluation": {"rows": 64},
}


@pytest.mark.parametrize(
    "use",
    [
        lambda workdir, config: read(workdir),
        lambda workdir, config: claim(workdir, config),
        lambda workdir, config: check_model(workdir, config),
        lambda workdir, config: transformer_jax.load(str(workdir)),
    ],
    ids=["read", "train", "score", "load"],
)
def test_a_run_of_version_0_1_is_refused_with_the_reason(tiny, tmp_path, use):
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OLD))
    with pytest.raises(ConfigError) as error:
        use(tmp_path, tiny)
    message = str(error.value)
    assert (
        f"--workdir={tmp_path}, config.json: "
        "config.task = 'translation' is not a task: choose one of seq" in message
    )
    assert (
        "Version 0.1 had 'translation', with other config keys; "
        "use that version for its runs" in message
    )
    assert "train there first" not in message  # the workdir does hold a run
    assert json.loads(path.read_text()) == OLD


def test_a_run_of_version_0_1_that_has_learned_nothing_makes_room(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    claim(tmp_path, tiny)
    assert read(tmp_path).to_dict() == tiny.to_dict()


def test_classes_belong_to_the_model(corpus, tmp_path):
    """In another order, the same probabilities would belong to other classes."""
    config = small("classification", corpus)
    claim(tmp_path, config)
    config.data.labels = ("odd", "even")
    with pytest.raises(
        ConfigError,
        match=r"parameters of another model; do not change:\n  config.data.labels",
    ):
        check_model(tmp_path, config)


def test_one_that_has_learned_nothing_takes_any_config(tiny, tmp_path):
    """A first attempt that failed, e.g. because of a wrong key or file, does not
    block the workdir.
    """
    claim(tmp_path, tiny)
    files.write_made(tmp_path / "tokenizer.json", b"{}")
    tiny.data.train_split = "val"
    claim(tmp_path, tiny)
    assert read(tmp_path).data.train_split == "val"
    assert not (tmp_path / "tokenizer.json").exists()
    files.write_made(tmp_path / "tokenizer.json", b"{}")
    claim(tmp_path, tiny)  # the data files may have changed
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("age", [-9, 0, 9])
def test_a_tokenizer_that_the_user_put_there_stays(age, tiny, tmp_path):
    """Whether it is older or newer than config.json, also after several attempts."""
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    for _ in range(3):
        claim(tmp_path, tiny)
        assert path.read_text() == "{}"
        os.utime(path, (time.time() - age,) * 2)


def test_a_tokenizer_that_the_user_has_changed_stays(tiny, tmp_path):
    claim(tmp_path, tiny)
    path = tmp_path / "tokenizer.json"
    files.write_made(path, b"{}")
    path.write_text("{ }")
    claim(tmp_path, tiny)
    assert path.read_text() == "{ }"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_error_does_not_make_a_workdir_look_new(
    number, tiny, learned, monkeypatch
):
    """With checkpoints that seem to be missing, the config would be replaced and the
    tokenizers removed.
    """
    stat = os.stat

    def fail(path, *args, **kwargs):
        if str(path).endswith("checkpoints"):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        claim(learned, changed(tiny, {"model.d_model": 32}))
    monkeypatch.undo()
    assert read(learned).to_dict() == tiny.to_dict()


@pytest.mark.parametrize(
    "config", ['{"mine": "important"}', '{"model_type": "bert"', "[]"]
)
def test_a_folder_that_is_no_run_loses_nothing(config, tiny, tmp_path):
    files = {
        "config.json": config,
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(
        ConfigError,
        match=f"--workdir={re.escape(str(tmp_path))}, config.json: it .* choose",
    ):
        claim(tmp_path, tiny)
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_one_that_cannot_be_written_or_lacks_its_config(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    for write in (claim, store):
        with pytest.raises(ConfigError, match=r"file/run cannot be written"):
            write(tmp_path / "file" / "run", tiny)
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has checkpoints but no config.json"):
        claim(tmp_path / "old", tiny)
    with pytest.raises(ConfigError, match=r"is not the folder of a run"):
        read(tmp_path)


def test_paths_of_data_are_stored_absolute(tiny, tmp_path, monkeypatch):
    """A run can be continued from another folder."""
    monkeypatch.chdir(tmp_path)
    tiny.data.directory, tiny.init_from = "my data", "../runs/mini"
    stored = settled("run", tiny)
    assert stored.data.directory == str(tmp_path / "my data")
    assert stored.init_from == str(tmp_path.parent / "runs" / "mini")
    assert tiny.data.directory == "my data"
    for kept in ("gs://bucket/data", "/data", ""):
        tiny.data.directory = kept
        assert settled("run", tiny).data.directory == kept


def test_a_run_that_stored_a_relative_start_can_be_continued(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tiny.init_from = "runs/mini"
    claim("run", tiny)
    Path("run/checkpoints").mkdir()
    claim("run", settled("run", tiny))
    tiny.init_from = "runs/other"
    with pytest.raises(
        ConfigError,
        match=r"config.init_from: 'runs/mini' in the workdir, '/.*/runs/other' now",
    ):
        claim("run", settled("run", tiny))


def test_a_run_made_longer_keeps_its_warmup(tiny, tmp_path):
    tiny.optimizer.warmup_steps = share(tiny, 4)
    tiny.training.steps = 100
    claim(tmp_path, settled(tmp_path, tiny))
    tiny.training.steps = 200
    # nothing is trained yet
    assert settled(tmp_path, tiny).optimizer.warmup_steps == 50
    (tmp_path / "checkpoints").mkdir()
    assert settled(tmp_path, tiny).optimizer.warmup_steps == 25
    claim(tmp_path, settled(tmp_path, tiny))
    tiny.optimizer.warmup_steps = 30  # set by hand
    with pytest.raises(
        ConfigError, match=r"config.optimizer.warmup_steps: 25 in the workdir, 30 now"
    ):
        claim(tmp_path, settled(tmp_path, tiny))


@pytest.mark.parametrize("value", [False, True])
def test_a_key_that_is_gone_is_read_if_the_model_is_the_same(tmp_path, value):
    config = small("bert_pretraining", "data")
    store(tmp_path, config)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    stored["model"]["match_embedding"] = value
    path.write_text(json.dumps(stored))
    if not value:
        assert read(tmp_path).to_dict() == config.to_dict()
        return
    with pytest.raises(ConfigError, match="this version has no such key; use the vers"):
        read(tmp_path)
