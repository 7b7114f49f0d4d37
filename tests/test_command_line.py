"""--help, recipes and config keys on the command line, and how errors end a script."""

import errno
import signal
import sys
from pathlib import Path

import jax
import pytest

from helpers import ROOT
from helpers.abusing import refused, unharmed
from helpers.forked import script
from transformer_jax import command_line
from transformer_jax.errors import UserError

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))

OF_RUNS = ("evaluate", "predict", "attention_report", "minimal_pairs", "export")

OF_RECIPES = ("train", "benchmark", "describe", "verify", "sweep")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_complete_and_no_error(name):
    done = script(name, "--help")
    text = done.stdout.decode()
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"    python scripts/{name}.py --" in text, "the help has no example"
    assert ("--config.SECTION.KEY=VALUE" in text) == (
        name not in ("prepare", "concatenate", "documents")
    )
    if name in (*OF_RUNS, "train", "sweep"):
        assert "--workdir=…\n" in text
    if name in OF_RECIPES:
        recipe = "recipe, configs/NAME.py[:ARG] or NAME[:ARG]"
        assert f"--config=…\n      {recipe} (required)" in text
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
        (None, ("there is no file", "name a recipe, e.g. --config=dates")),
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
        "write --config=dates for the recipe of transformer_jax",
    )


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


def test_commands_to_copy_are_quoted(recipe, tmp_path):
    workdir = tmp_path / "my run; ls"
    done = script(
        "train",
        f"--config={recipe}",
        f"--workdir={workdir}",
        "--config.training.steps=1",
    )
    assert (
        f"  python scripts/evaluate.py '--workdir={workdir}'\n" in done.stderr.decode()
    )


@pytest.fixture
def ended_by(monkeypatch, capsys):
    """Return a function that lets a script raise an error, and returns its exit code
    and what it says.
    """
    monkeypatch.setattr(command_line.console, "prepare", lambda: None)
    monkeypatch.setattr(command_line.signals, "end_on_signals", lambda end: None)
    monkeypatch.setattr(command_line.processes, "leave", sys.exit)
    before = signal.getsignal(signal.SIGTERM)

    def run(error: Exception) -> tuple[int, str]:
        def main() -> None:
            raise error

        with pytest.raises(SystemExit) as ended:
            command_line.run(main, ["script"], distributed=False)
        assert signal.getsignal(signal.SIGTERM) is before
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("kind", "text", "code", "said"),
    [
        (
            MemoryError,
            "Unable to allocate 4.00 TiB for an array",
            2,
            "error: out of memory (Unable to allocate 4.00",
        ),
        (
            jax.errors.JaxRuntimeError,
            "RESOURCE_EXHAUSTED: no memory",
            2,
            "error: out of memory (RESOURCE_EXHAUSTED",
        ),
        (
            ValueError,
            "RESOURCE_EXHAUSTED: quota of the bucket",
            1,
            "ValueError: RESOURCE_EXHAUSTED: quota",
        ),
    ],
)
def test_memory_that_runs_out_is_an_error_with_a_remedy(
    ended_by, kind, text, code, said
):
    found, stderr = ended_by(kind(text))
    assert found == code
    assert said in stderr


def test_an_error_of_the_disk_may_pass(ended_by):
    code, stderr = ended_by(OSError(errno.ESTALE, "Stale file handle"))
    assert code == 1
    assert stderr.startswith("Traceback")
    assert "Stale file handle" in stderr


def test_an_error_for_the_user_is_a_message(ended_by):
    assert ended_by(UserError("there is no such run")) == (
        2,
        "error: there is no such run\n",
    )


def test_the_survivor_of_a_dead_process_says_so(ended_by, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    code, stderr = ended_by(ValueError("Gloo all-reduce failed: Connection closed"))
    assert code == 1
    assert stderr.startswith(
        "error: another process of this run has died or cannot be reached, so this one "
        "cannot go on. Start all processes again"
    )
