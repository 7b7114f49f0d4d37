"""Folders that somebody sent: nothing in them chooses code to run, or files outside
of them.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from etils import epath

import transformer_jax
from helpers.abusing import refused
from helpers.bert_folders import PRETRAINING, drawn, save
from helpers.corpus import write_corpus
from helpers.forked import script
from helpers.parity import write_file
from helpers.runs import run, small
from transformer_jax import conversion, experiment, tasks, transfer
from transformer_jax.config import ConfigError, defaults
from transformer_jax.data.sources import DataError, tfds_source
from transformer_jax.errors import UserError
from transformer_jax.interop.tensors import InteropError, Tensors
from transformer_jax.predictor import Predictor
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.training import manifest
from transformer_jax.workdir import check_model, claim, read

# `this` is a module of Python that prints a poem when it is imported.
PRINTS = "this:Poem"
EVIL = "from pathlib import Path\nPath(MARKER).touch()\n"
EVIL += (
    "from transformer_jax.tasks.sequence_to_sequence "
    "import SequenceToSequence as Task\n"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(small("sequence_to_sequence", corpus), folder, training__steps=2)
    return folder


@pytest.fixture
def marker(tmp_path) -> Path:
    """The file that the code of a foreign folder writes."""
    return tmp_path / "marker"


@pytest.fixture
def sent(trained, tmp_path, marker, monkeypatch) -> Path:
    """A run whose config.json names a task in a module that lies in the folder and
    can be imported.
    """
    folder = tmp_path / "sent"
    shutil.copytree(trained, folder)
    named(folder, "sent_module:Task")
    (folder / "sent_module.py").write_text(EVIL.replace("MARKER", repr(str(marker))))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(tasks, "_named", set())
    yield folder
    sys.modules.pop("sent_module", None)


def named(folder: Path, task: object) -> None:
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"task": task}))


OPENED = {
    "load": lambda sent, config: transformer_jax.load(str(sent)),
    "read": lambda sent, config: read(sent),
    "Predictor": lambda sent, config: Predictor(sent, config),
    "check_model": lambda sent, config: check_model(sent, config),
    "claim": lambda sent, config: claim(sent, config),
    "from": lambda sent, config: transfer.keys_for(str(sent)),
    "init_from": lambda sent, config: run(
        config, sent.parent / "new", init_from=str(sent)
    ),
    "train": lambda sent, config: experiment.run(config, sent),
    "to_folder": lambda sent, config: conversion.to_folder(
        sent, config, str(sent.parent / "new")
    ),
}


@pytest.mark.parametrize("way", OPENED)
def test_a_run_does_not_choose_code(sent, corpus, marker, way):
    with pytest.raises(
        ConfigError,
        match=(
            "'sent_module:Task' is not a task of transformer_jax, and a folder may not"
        ),
    ):
        OPENED[way](sent, small("sequence_to_sequence", corpus))
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["evaluate", "predict", "attention_report", "compare", "convert"]
)
def test_scripts_do_not_run_what_a_folder_names(trained, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    named(folder, PRINTS)
    arguments = {
        "compare": (
            f"--workdirs={folder}",
            "--lengths=2,4",
            "--values=bleu",
            f"--output={tmp_path / 'a.svg'}",
        ),
        "convert": (f"--workdir={folder}", f"--to_huggingface={tmp_path / 'new'}"),
        "attention_report": (f"--workdir={folder}", f"--output={tmp_path / 'a.html'}"),
    }
    result = script(name, *arguments.get(name, (f"--workdir={folder}",)), stdin=b"ek\n")
    # nothing on stdout: no poem
    refused(result, f"config.task = '{PRINTS}'", f"--task={PRINTS}")


@pytest.mark.parametrize(
    "task", [["this:Poem"], {"a": 1}, None, 3, "this", ":", "", "os:system"]
)
def test_no_value_of_the_key_is_code(sent, task):
    named(sent, task)
    with pytest.raises(ConfigError, match=r"config\.task = .* is not a task"):
        read(sent)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": 3}, r"config\.data = 3: must be an object of keys and values"),
        ({"mesh": None}, r"config\.mesh = None: must be an object"),
        ({"init_from": {"a": 1}}, r"config\.init_from = {'a': 1}: must be a text"),
        (
            {"model": {"architecture": ["x"]}},
            r"config\.model\.architecture = \['x'\]: must be one of",
        ),
        ({"model": {"evil": 1}}, r"config\.model\.evil is not a key"),
    ],
)
@pytest.mark.parametrize("way", ["load", "from"])
def test_a_config_of_other_types_is_refused(trained, tmp_path, way, keys, message):
    shutil.copytree(trained, tmp_path / "sent")
    stored = json.loads((trained / "config.json").read_text())
    (tmp_path / "sent" / "config.json").write_text(json.dumps(stored | keys))
    with pytest.raises(ConfigError, match=message):
        OPENED[way](tmp_path / "sent", None)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"model_type": ' + "[" * 100_000, "9" * 5000]
)
def test_json_that_is_too_deep_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    for read_folder in (transfer.keys_for, conversion.config_for, transformer_jax.load):
        with pytest.raises(UserError, match=r"config\.json"):
            read_folder(str(tmp_path))


def test_the_user_names_the_task_in_an_argument(sent, marker):
    predictor = transformer_jax.load(str(sent), task="sent_module:Task")
    assert marker.exists()
    assert len(predictor.predict(["ek"])) == 1


def test_the_user_passes_the_class(sent):
    named(sent, f"{__name__}:Mine")
    assert transformer_jax.load(str(sent), task=Mine).config.task == f"{__name__}:Mine"
    with pytest.raises(ValueError, match="give the name instead, 'module:Class'"):
        transformer_jax.load(
            str(sent),
            task=type("Mine", (SequenceToSequence,), {"__module__": __name__}),
        )


class Mine(SequenceToSequence):
    """A task of a user."""


def test_another_name_than_that_of_the_folder_is_not_enough(sent, marker):
    with pytest.raises(ConfigError, match="--task=sent_module:Task"):
        transformer_jax.load(str(sent), task="sequence_to_sequence")
    assert not marker.exists()


def test_the_user_names_the_task_in_a_flag(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    name = "transformer_jax.tasks.sequence_to_sequence:SequenceToSequence"
    named(folder, name)
    result = script("predict", f"--workdir={folder}", f"--task={name}", stdin=b"ek\n")
    assert result.returncode == 0, result.stderr.decode()
    refused(
        script("predict", f"--workdir={folder}", "--task=nowhere:Task"),
        "'nowhere:Task' cannot be imported",
    )


def test_a_recipe_may_start_from_a_folder_whose_task_a_later_flag_names(
    trained, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    name = "transformer_jax.tasks.sequence_to_sequence:SequenceToSequence"
    named(folder, name)
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from transformer_jax.transfer import keys_for\n\n"
        f"def get_config():\n    raise ValueError(len(keys_for({str(folder)!r})) > 9)\n"
    )
    refused(
        script("describe", f"--config={recipe}"), "a folder may not choose code to run"
    )
    refused(
        script("describe", f"--config={recipe}", f"--task={name}"), "ValueError: True"
    )


def test_a_recipe_is_the_users_code_and_may_name_a_task(sent, corpus, marker):
    config = small("sequence_to_sequence", corpus)
    config.task = "sent_module:Task"
    assert int(run(config, sent, training__steps=4).step) == 4
    assert marker.exists()


@pytest.mark.parametrize(
    "keys", [{"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True}, {}]
)
def test_code_in_a_folder_of_hugging_face_is_not_run(
    tmp_path, marker, monkeypatch, keys
):
    folder = save(tmp_path / "sent", drawn(PRETRAINING), **keys)
    for name in (
        "evil",
        "modeling_bert",
        "configuration_bert",
        "tokenization_bert",
        "setup",
    ):
        (folder / f"{name}.py").write_text(EVIL.replace("MARKER", repr(str(marker))))
    monkeypatch.syspath_prepend(folder)
    conversion.to_workdir(conversion.config_for(str(folder)), tmp_path / "run")
    assert not marker.exists()


def index(folder: Path, shard: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": shard}})
    )


@pytest.mark.parametrize(
    "shard",
    ["../secret.safetensors", "in/../../secret.safetensors", "{}/secret.safetensors"],
)
def test_an_index_does_not_name_files_elsewhere(tmp_path, shard):
    write_file(tmp_path / "secret.safetensors", drawn({"a": (2, 3)}))
    (tmp_path / "sent" / "in").mkdir(parents=True)
    index(tmp_path / "sent", shard.format(tmp_path))
    with pytest.raises(
        InteropError, match=r"names .*secret\.safetensors, which is not in this folder"
    ):
        Tensors(tmp_path / "sent")


def test_a_folder_of_links_as_the_hub_makes_them_is_read(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "main").mkdir(parents=True)
    write_file(tmp_path / "blobs" / "0a1b", drawn({"a": (2, 3)}))
    folder = tmp_path / "snapshots" / "main"
    (folder / "one.safetensors").symlink_to("../../blobs/0a1b")
    index(folder, "one.safetensors")
    assert Tensors(folder)["a"].shape == (2, 3)


def test_a_manifest_does_not_name_files_elsewhere(trained, tmp_path):
    step = epath.Path(tmp_path / "2")
    shutil.copytree(trained / "checkpoints" / "2", step)
    stored = json.loads((step / "manifest.json").read_text())
    (tmp_path / "secret").write_text("secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    stored["files"]["../secret"] = {"size": 6, "sha256": digest}
    (step / "manifest.json").write_text(json.dumps(stored))
    assert "../secret is not in the folder" in str(manifest.damage(step))


def prepared(folder: Path, feature: str) -> None:
    """Write what tfds reads of a prepared data set."""
    folder.mkdir(parents=True)
    inner = {"iso": {"pythonClassName": feature, "text": {}}}
    features = {
        "pythonClassName": (
            "tensorflow_datasets.core.features.features_dict.FeaturesDict"
        ),
        "featuresDict": {"features": inner},
    }
    (folder / "features.json").write_text(json.dumps(features))
    info = {
        "name": folder.parent.name,
        "version": "1.0.0",
        "fileFormat": "array_record",
        "splits": [],
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))


def test_prepared_data_does_not_choose_code(tmp_path, marker, monkeypatch):
    prepared(tmp_path / "sent" / "1.0.0", "sent_feature.Feature")
    (tmp_path / "sent_feature.py").write_text(EVIL.replace("MARKER", repr(str(marker))))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        DataError, match=r"sent_feature\.Feature is not a feature of tfds"
    ):
        tfds_source("sent", tmp_path, "train", ["iso"])
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    ["huggingface:sent", "someone:sent/x", "Sent", "sent/..", "sent/data_dir=.."],
)
def test_the_name_of_a_data_set_does_not_choose_code(tmp_path, name):
    with pytest.raises(DataError, match=r"Set data\.name to NAME or NAME/CONFIG"):
        tfds_source(name, tmp_path, "train", ["iso"])


@pytest.mark.parametrize(
    ("section", "key"), [("evaluation", "bleu_tokenizer"), ("data", "tokenizer")]
)
def test_names_of_tokenizers_are_those_of_a_list(trained, tmp_path, section, key):
    shutil.copytree(trained, tmp_path / "sent")
    stored = json.loads((tmp_path / "sent" / "config.json").read_text())
    stored[section][key] = "../../evil.py"
    (tmp_path / "sent" / "config.json").write_text(json.dumps(stored))
    with pytest.raises(
        ConfigError,
        match=rf"config\.{section}\.{key} = '../../evil\.py': must be one of",
    ):
        transformer_jax.load(str(tmp_path / "sent"))


def test_the_tasks_of_this_package_need_no_name():
    for name in tasks.TASKS:
        assert tasks.is_known(name)
        assert defaults(name).task == name
