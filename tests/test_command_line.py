"""--help, recipes and config keys on the command line.

Also records for a predictor, and long predictions.
"""

import logging
from pathlib import Path

import jax
import pytest

import transformer_jax
from helpers import ROOT
from helpers.abusing import refused, unharmed
from helpers.forked import script
from transformer_jax import command_line
from transformer_jax.config import ConfigError, load_recipe
from transformer_jax.data import progress
from transformer_jax.predictor import Predictor
from transformer_jax.training import processes

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
OF_RUNS = ("evaluate", "predict", "attention_report")
OF_RECIPES = ("train", "benchmark", "describe", "verify")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_complete_and_no_error(name):
    done = script(name, "--help")
    text = done.stdout.decode()
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"    python scripts/{name}.py --" in text, "the help has no example"
    assert ("--config.SECTION.KEY=VALUE" in text) == (
        name not in ("prepare", "concatenate", "documents")
    )
    if name in (*OF_RUNS, "train"):
        assert "--workdir=…\n" in text
    if name in OF_RECIPES:
        assert "--config=…\n      recipe, configs/NAME.py[:ARG] (required)" in text
    assert ("--num_processes" in text) == (name in (*OF_RUNS, "train", "benchmark"))


def test_helpfull_has_the_libraries_options_too():
    done = script("predict", "--helpfull")
    assert done.returncode == 0
    assert b"--workdir" in done.stdout
    assert b"absl" in done.stdout


def test_what_is_required_is_said():
    assert b"      folder of a run (required)" in script("evaluate", "--help").stdout
    assert (
        b"HOST:PORT of the first process, if there are several\n"
        in script("evaluate", "--help").stdout
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--config.foo.bar=1",),
            ("config.foo.bar is not a key: the sections are checkpoint, data",),
        ),
        (
            ("--config.model.foo=1",),
            ("config.model.foo is not a key: the keys of config.model are",),
        ),
        (
            ("--config.d_model=8",),
            ("config.d_model is not a key: did you mean model.d_model?",),
        ),
        (("--config.modle.d_model=8",), ("did you mean model.d_model?",)),
        (("--config.=3",), ("write it as --config.SECTION.KEY=VALUE",)),
        (("--config.model.d_model",), ("write it as --config.model.d_model=VALUE",)),
        (("--config.model=3",), ("config.model is a section: set a key in it",)),
        (
            ("--config.model.d_model=wide",),
            ("config.model.d_model = 'wide': must be of type int",),
        ),
        (
            ("--config.optimizer.learning_rate=nan",),
            ("config.optimizer.learning_rate = nan: must be finite",),
        ),
        (
            ("--config.optimizer.learning_rate=inf",),
            ("config.optimizer.learning_rate = inf: must be finite",),
        ),
        (
            ("--config.model.dropout_rate=nan",),
            ("config.model.dropout_rate = nan: must be finite",),
        ),
    ],
)
def test_wrong_keys(recipe, tmp_path, arguments, words):
    with unharmed(tmp_path):
        refused(
            script(
                "train",
                f"--config={recipe}",
                f"--workdir={tmp_path / 'run'}",
                *arguments,
            ),
            *words,
        )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, ("there is no file", "name a recipe, e.g. configs/dates.py")),
        ("def get_config(arg=None)\n", ("line 1", "SyntaxError")),
        ("import nonsense_module\n", ("line 1", "No module named 'nonsense_module'")),
        (
            "def get_config(arg=None):\n    x = 1\n    return x / 0\n",
            ("line 3", "ZeroDivisionError"),
        ),
        (
            "import sys\n\ndef get_config(arg=None):\n    sys.exit()\n",
            ("line 4", "SystemExit"),
        ),
        ("def config():\n    return 1\n", ("the recipe has no function get_config",)),
        (
            "def get_config(arg=None):\n    return {}\n",
            ("get_config returned {}: return a ConfigDict",),
        ),
        ("def get_config():\n    return {}\n", ("TypeError", "0 positional arguments")),
        ("\0", ("recipe.py", "null bytes")),
    ],
)
def test_broken_recipes(tmp_path, source, words):
    if source is not None:
        (tmp_path / "recipe.py").write_text(source)
    with unharmed(tmp_path):
        command = (
            f"--config={tmp_path / 'recipe.py'}:arg",
            f"--workdir={tmp_path / 'run'}",
        )
        refused(script("train", *command), str(tmp_path / "recipe.py"), *words)


@pytest.mark.parametrize(
    "name", ["x" * 300, "~nobody-is-called-that/a.py", "a:" + "x" * 300]
)
def test_a_recipe_with_an_impossible_name(name):
    with pytest.raises(ConfigError, match="there is no file"):
        load_recipe(name)


def test_a_dead_peer_is_told_from_other_errors(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert processes.peer_has_died(
        ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    )
    assert not processes.peer_has_died(ValueError("shapes do not match"))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    assert not processes.peer_has_died(ValueError("Gloo all-reduce failed"))


def test_a_colon_in_the_path_of_a_recipe(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "recipe.py").write_text(
        "from transformer_jax.config import defaults\n"
        "def get_config(arg='none'):\n    config = defaults('sequence_to_sequence')\n "
        "   config.data.directory = arg\n    return config\n"
    )
    assert load_recipe(f"{folder}/recipe.py").data.directory == "none"
    assert load_recipe(f"{folder}/recipe.py:c:d").data.directory == "c:d"


def test_a_recipe_of_ours_from_another_folder(tmp_path):
    done = script(
        "train",
        "--config=configs/dates.py",
        f"--workdir={tmp_path / 'run'}",
        cwd=tmp_path,
    )
    refused(
        done,
        f"no file 'configs/dates.py' in {tmp_path}",
        f"write its full path, {ROOT / 'configs/dates.py'}",
    )


@pytest.fixture(scope="module")
def predictor(trained) -> Predictor:
    return transformer_jax.load(trained)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([None], "record 1 is None, of type NoneType: it must be a line of text"),
        (["ek", 3], "record 2 is 3, of type int"),
        ([b"ek"], "record 1 is b'ek', of type bytes: .*decode it"),
        ([["ek"]], "record 1 is .* of type list"),
        ([{"de": "dk"}], "record 1 has the fields de: it must have en"),
        ([{}], r"record 1 has the fields \(none\): it must have en"),
        ([{"en": None}], "record 1 has en = None: it must be text"),
        (
            "ek at",
            "'ek at' is one record, not a list of records: put it in square brackets",
        ),
        ({"en": "ek"}, "is one record, not a list"),
        (b"ek", "is one record, not a list"),
        (None, "None is not a list of records"),
        (5, "5 is not a list of records"),
    ],
)
def test_what_is_no_record(predictor, records, words):
    for method in (predictor.predict, predictor.attention):
        with pytest.raises(ValueError, match=words):
            method(records)


def test_records_may_come_one_by_one(predictor):
    assert len(predictor.predict(line for line in ("ek", "at", ""))) == 3
    assert predictor.predict([]) == []


def test_long_predictions_tell_how_far_they_are(predictor, monkeypatch, caplog):
    monkeypatch.setattr(progress, "EVERY", (0.001, 0.001))
    with caplog.at_level(logging.INFO, logger="transformer_jax"):
        predictor.predict(["ek at ek"] * 5)
    assert "0 of 5 examples done; compiling for the first batch" in caplog.text


def test_files_of_a_run_are_no_output(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in (
        "config.json",
        "tokenizer.source.json",
        "wandb.json",
        "checkpoints/x",
        "report.html",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to("config.json")
    for name in (
        "config.json",
        "tokenizer.source.json",
        "wandb.json",
        "checkpoints/x",
        "link",
    ):
        with pytest.raises(ValueError, match="is a file of the run"):
            command_line.check_output(str(tmp_path / name), workdir=str(tmp_path))
    for name in ("report.html", "new.html"):
        command_line.check_output(str(tmp_path / name), workdir=str(tmp_path))


def test_names_in_a_bucket_are_compared_as_they_are():
    with pytest.raises(ValueError, match="is also the input"):
        command_line.check_output("gs://bucket/a", "gs://bucket/a")
    command_line.check_output("gs://bucket/a", "gs://bucket/b", str(Path("runs")))
