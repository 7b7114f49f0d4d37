"""Scripts whose standard streams are closed or full, whose user has no home, or
whose locale is not UTF-8.
"""

import errno
import json
import os
import signal
import subprocess
import sys

import jax
import pytest

from helpers import ROOT
from helpers.forked import begun, script
from transformer_jax import command_line
from transformer_jax.errors import UserError

# Close the streams with these numbers, or send them to a full disk, like a shell, and
# run a script.
PROGRAM = """
import os, pwd, runpy, sys
numbers, full = sys.argv[1], sys.argv[2] == "full"
for number in map(int, numbers):
    os.close(number)
    if full:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    else:
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
if not numbers:
    def getpwuid(uid):
        raise KeyError(uid)
    pwd.getpwuid = getpwuid
    del os.environ["HOME"]
    os.environ.pop("XDG_CACHE_HOME", None)
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def with_streams(tmp_path):
    """Return a function that runs a script with closed or full streams."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(
        numbers: str, how: str, name: str, *arguments: str
    ) -> subprocess.CompletedProcess:
        path = str(ROOT / "scripts" / f"{name}.py")
        with begun(
            tmp_path / "program.py", numbers, how, path, *arguments, stdin=b"ek at\n"
        ) as running:
            return running.end()

    return run


@pytest.mark.parametrize(
    ("numbers", "how"),
    [
        ("012", "closed"),
        ("12", "full"),
        pytest.param("1", "closed", marks=pytest.mark.slow),
        pytest.param("2", "full", marks=pytest.mark.slow),
    ],
)
def test_training_needs_no_streams(with_streams, recipe, tmp_path, numbers, how):
    done = with_streams(
        numbers, how, "train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}"
    )
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert ("trained to step 4" in done.stderr.decode()) == (numbers == "1")
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize(("numbers", "how"), [("02", "closed"), ("2", "full")])
def test_results_come_without_messages(with_streams, trained, numbers, how):
    done = with_streams(numbers, how, "evaluate", f"--workdir={trained}")
    assert done.returncode == 0
    assert json.loads(done.stdout)["step"] == 4


@pytest.mark.parametrize("name", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("how", "words"),
    [("closed", "Bad file descriptor"), ("full", "No space left on device")],
)
def test_results_that_cannot_be_written_are_an_error(
    with_streams, trained, name, how, words
):
    done = with_streams("1", how, name, f"--workdir={trained}")
    assert done.returncode == 2, done.stderr.decode()
    assert (
        done.stderr.decode()
        .splitlines()[-1]
        .startswith(f"error: stdout cannot be written: {words}. Results go")
    )


def test_input_that_cannot_be_read_is_an_error(with_streams, trained):
    done = with_streams("0", "closed", "predict", f"--workdir={trained}")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(
        "error: --input=- cannot be read: Bad file descriptor; name a text file"
    )


def test_a_user_without_home_and_name_can_train(with_streams, recipe, tmp_path):
    done = with_streams(
        "", "", "train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}"
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_user_without_home_and_name_has_results(with_streams, trained, name):
    done = with_streams("", "", name, f"--workdir={trained}")
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.splitlines()) == 1


def test_a_locale_without_utf8(tmp_path):
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
    }
    command = [sys.executable, ROOT / "scripts" / "predict.py", "--workdir=ñandú"]
    done = subprocess.run(
        command, env=environment, capture_output=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert done.stderr.decode().startswith(
        "error: --workdir=ñandú is not the folder of a run"
    )


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
