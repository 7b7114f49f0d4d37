"""Lock of a workdir: only one run trains there at a time, and the lock of a dead run
is taken over.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from etils import epath

from helpers import ROOT
from helpers.abusing import refused, unharmed
from helpers.bucket import served
from helpers.corpus import write_corpus
from helpers.forked import script
from helpers.processes import STORES_NO_PROGRAMS
from helpers.runs import RECIPE, rows
from transformer_jax import experiment
from transformer_jax.training import lock
from transformer_jax.training.lock import InUse, held


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {
        "HEARTBEAT": 0.05,
        "EXPIRY": 1.5,
        "LOOK": 0.02,
        "SETTLE": 0.2,
    }.items():
        monkeypatch.setattr(lock, name, seconds)


def owner(**changes) -> str:
    """Return the lock file of this process, with changes."""
    own = {
        "host": "vm",
        "pid": os.getpid(),
        "started": "2026-01-02 03:04:05 UTC",
        "token": "theirs",
    }
    own |= {
        "process_born": lock._birth(os.getpid()),
        "machine": lock._machine(),
        "beats": 0,
    }
    return json.dumps(own | changes)


@pytest.fixture
def left(tmp_path):
    """Return a function that leaves a lock in a workdir."""

    def leave(text: str) -> Path:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / lock.NAME).write_text(text)
        return tmp_path / "run"

    return leave


@pytest.fixture(scope="module")
def dead() -> int:
    """Process id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_it_is_held_for_the_time_of_the_run(tmp_path):
    with held(tmp_path / "new" / "run"):
        told = json.loads((tmp_path / "new" / "run" / "lock.json").read_text())
        assert told["pid"] == os.getpid()
        with pytest.raises(
            InUse,
            match=(
                rf"--workdir=.*is in use: process {os.getpid()} on \S+ \(started 20.*"
                r" UTC\)"
            ),
        ):
            held(tmp_path / "new" / "run").__enter__()
        time.sleep(0.2)  # the refused run leaves the lock alone
        assert json.loads((tmp_path / "new" / "run" / "lock.json").read_text()) == told
    assert list((tmp_path / "new" / "run").iterdir()) == []
    with pytest.raises(KeyError), held(tmp_path):
        raise KeyError
    assert not (tmp_path / "lock.json").exists()


def test_a_run_that_lives_keeps_its_workdir(left):
    workdir = left(owner())
    with (
        unharmed(workdir),
        pytest.raises(
            InUse, match=r"started 2026-01-02 03:04:05 UTC\) is training there"
        ),
    ):
        held(workdir).__enter__()


def test_a_copy_of_a_workdir_in_use_is_free(tmp_path, caplog):
    with held(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with held(tmp_path / "copy"):
            assert "which trains in another folder: this is a copy" in caplog.text
        (tmp_path / "run").rename(tmp_path / "renamed")
        with pytest.raises(InUse):
            held(tmp_path / "renamed").__enter__()


def test_a_disk_error_does_not_remove_the_lock_of_another_run(left, monkeypatch):
    workdir = left(owner())

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("builtins.open", fail)
    with unharmed(workdir), pytest.raises(OSError, match="Input/output error"):
        held(workdir).__enter__()


@pytest.mark.parametrize(
    "changes",
    [{"pid": "dead"}, {"process_born": "1"}, {"pid": "zombie"}, {"pid": 2**30}],
    ids=["dead", "number used again", "not buried", "no such number"],
)
def test_a_dead_runs_lock_is_taken_over_at_once(left, dead, changes, caplog):
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    numbers = {"dead": dead, "zombie": zombie.pid}
    workdir = left(
        owner(**{key: numbers.get(value, value) for key, value in changes.items()})
    )
    start = time.monotonic()
    with held(workdir):
        assert json.loads((workdir / "lock.json").read_text())["token"] != "theirs"
    assert time.monotonic() - start < lock.EXPIRY
    assert "which is no longer running" in caplog.text
    assert caplog.text.count("taken over from process") == 1
    zombie.wait()


@pytest.mark.skipif(
    sys.platform != "linux", reason="the start time of a process is known on Linux only"
)
def test_another_users_process_that_cannot_be_looked_at_lives(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    assert lock._lives(os.getpid(), lock._birth(os.getpid()))
    monkeypatch.setattr(lock.os, "kill", forbidden)
    monkeypatch.setattr(lock, "_birth", lambda pid: None)
    assert lock._lives(1, "5")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (owner(machine="other", host="far"), f"process {os.getpid()} on far"),
        ("", "an unknown run"),
        ("{}", "an unknown run"),
        ('{"pid": -1}', "an unknown run"),
        ('{"pid": 1', "an unknown run"),
        ("[3]", "an unknown run"),
    ],
    ids=["a run", "nothing", "no keys", "no number", "half a file", "a list"],
)
def test_on_another_machine_a_run_without_a_heartbeat_is_dead(left, text, name, caplog):
    workdir = left(text)
    start = time.monotonic()
    with held(workdir):
        assert time.monotonic() - start > lock.EXPIRY
    assert f"waiting up to 2 s for a heartbeat of {name}" in caplog.text
    assert f"taken over from {name}" in caplog.text


@pytest.mark.parametrize("beat", ["touched", "written"])
def test_on_another_machine_a_heartbeat_tells_that_it_lives(left, beat, monkeypatch):
    workdir = left(owner(machine="other", host="far"))
    monkeypatch.setattr(lock, "EXPIRY", 30.0)

    def show():
        if beat == "touched":
            os.utime(workdir / "lock.json", (5, 5))
        else:
            (workdir / "lock.json").write_text(owner(machine="other", beats=1))

    timer = threading.Timer(0.3, show)
    timer.start()
    with pytest.raises(InUse, match=r"process \d+ on far"):
        held(workdir).__enter__()
    timer.join()


def test_one_that_is_released_while_it_is_watched_is_free(left, monkeypatch):
    workdir = left(owner(machine="other"))
    monkeypatch.setattr(lock, "EXPIRY", 30.0)
    timer = threading.Timer(0.3, (workdir / "lock.json").unlink)
    timer.start()
    with held(workdir):
        assert (workdir / "lock.json").exists()


@pytest.mark.parametrize("late", [False, True], ids=["together", "one late"])
def test_of_many_that_take_a_dead_runs_lock_one_gets_it(left, dead, late, monkeypatch):
    """The late one has found the owner dead, and is suspended before it removes the
    lock, for longer than the others would wait.
    """
    workdir, together = left(owner(pid=dead)), threading.Barrier(8)
    lost = []
    monkeypatch.setattr(lock._Lock, "_end", lambda self, heir: lost.append(heir))
    if late:
        removed, read = lock._Lock._removed, lock._Lock._read
        late_ones = []

        def suspended(self):
            text = read(self)
            if late_ones == [self]:
                late_ones.append(None)  # it is late once
                time.sleep(1)
            return text

        def first_is_late(self, text):
            if not late_ones:
                late_ones.append(self)
            return removed(self, text)

        monkeypatch.setattr(lock._Lock, "_read", suspended)
        monkeypatch.setattr(lock._Lock, "_removed", first_is_late)
    got, refusals, until = [], [], threading.Event()

    def attempt():
        together.wait()
        try:
            with held(workdir):
                got.append(1)
                until.wait(30)
        except InUse:
            refusals.append(1)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    stop = time.monotonic() + 30
    while len(got) + len(refusals) < 8 and time.monotonic() < stop:
        time.sleep(0.01)
    until.set()
    for thread in threads:
        thread.join()
    assert (len(got), len(refusals)) == (1, 7)
    assert not lost


LOSES = """
import pathlib, sys, time
from transformer_jax.training import lock
lock.HEARTBEAT = 0.05
with lock.held(sys.argv[1]):
    (pathlib.Path(sys.argv[1]) / "lock.json").write_text(sys.argv[2])
    time.sleep(60)
print("not reached")
"""


def test_a_run_that_has_lost_its_lock_ends_and_leaves_the_heirs(tmp_path):
    command = [sys.executable, "-c", LOSES, str(tmp_path), owner(host="heir")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    message = refused(
        done, f"--workdir={tmp_path} was taken over by process", "on heir"
    )
    assert "this run has ended" in message
    assert json.loads((tmp_path / "lock.json").read_text())["host"] == "heir"


def test_a_lock_that_somebody_removes_comes_back(tmp_path):
    with held(tmp_path):
        (tmp_path / "lock.json").unlink()
        stop = time.monotonic() + 10
        while not (tmp_path / "lock.json").exists():
            assert time.monotonic() < stop
            time.sleep(0.01)
        with pytest.raises(InUse):
            held(tmp_path).__enter__()


def test_a_workdir_that_somebody_removes_does_not_come_back(tmp_path):
    with held(tmp_path / "run"):
        (tmp_path / "run" / "lock.json").unlink()
        (tmp_path / "run").rmdir()
        time.sleep(0.3)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        lambda path: path.symlink_to("nowhere"),
        lambda p: p.symlink_to(p.name),
    ],
)
def test_a_lock_that_is_no_file(tmp_path, make):
    make(tmp_path / "lock.json")
    with (
        unharmed(tmp_path),
        pytest.raises(
            ValueError, match=r"cannot be written: .*lock\.json.*; choose another"
        ),
    ):
        held(tmp_path).__enter__()


def test_a_heartbeat_writes_no_byte(tmp_path, monkeypatch):
    """The heartbeat must work on a full disk, where a run continues until it has to
    save.
    """
    with held(tmp_path):
        monkeypatch.setattr(lock._Lock, "_write", lambda self: pytest.fail("written"))
        before = os.stat(tmp_path / "lock.json").st_mtime
        time.sleep(0.3)
        assert os.stat(tmp_path / "lock.json").st_mtime > before


def test_a_slow_heartbeat_leaves_no_lock(tmp_path, monkeypatch):
    """On a slow network, a heartbeat may take longer than the time between two
    heartbeats.
    """
    write = lock._Lock._write
    with held(tmp_path):
        monkeypatch.setattr(
            lock._Lock, "_write", lambda self: time.sleep(0.4) or write(self)
        )
        (tmp_path / "lock.json").unlink()
        time.sleep(0.2)  # a heartbeat is about to write the lock again
    time.sleep(0.5)
    assert not (tmp_path / "lock.json").exists()


def test_in_a_bucket(monkeypatch):
    """A bucket has no exclusive creation of files.

    If two runs write a lock, the last one holds it.
    """
    pytest.importorskip("gcsfs", reason="no gcsfs: pip install 'transformer_jax[gcs]'")
    with served() as (store, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        workdir, key = epath.Path("gs://bucket/run"), "bucket/run/lock.json"

        with held(workdir):
            before = json.loads(store.objects[key][0])
            with pytest.raises(
                InUse, match="--workdir=gs://bucket/run is in use: process"
            ):
                held(workdir).__enter__()
            time.sleep(0.5)
            after = json.loads(store.objects[key][0])
            assert after["beats"] > before["beats"]
            assert after["token"] == before["token"]
        assert key not in store.objects

        store.put(key, owner(machine="other").encode())
        refused = threading.Event()

        def beat() -> None:
            beats = 0
            while not refused.wait(0.1):
                store.put(
                    key, owner(machine="other", beats=(beats := beats + 1)).encode()
                )

        other = threading.Thread(target=beat)
        other.start()
        with pytest.raises(InUse):
            held(workdir).__enter__()
        refused.set()
        other.join()
        with held(workdir):  # the other run has died
            assert json.loads(store.objects[key][0])["token"] != "theirs"

        monkeypatch.setattr(lock, "SETTLE", 1.0)
        timer = threading.Timer(0.5, lambda: store.put(key, owner().encode()))
        timer.start()
        with pytest.raises(InUse):
            held(workdir).__enter__()
        assert json.loads(store.objects[key][0])["token"] == "theirs"


@pytest.fixture
def running(recipe, tmp_path):
    """Run in a process of its own, which has saved its first checkpoint and has many
    steps left.
    """
    workdir = tmp_path / "run"
    options = [
        f"--config={recipe}",
        f"--workdir={workdir}",
        "--config.training.steps=100000",
    ]
    options += [
        "--config.training.evaluate_every=100000",
        "--config.checkpoint.keep_best=0",
    ]
    command = [
        sys.executable,
        "scripts/train.py",
        *options,
        "--config.checkpoint.every=3",
    ]
    environment = os.environ | STORES_NO_PROGRAMS
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, env=environment
    ) as process:
        stop = time.monotonic() + 120
        while not list(workdir.glob("checkpoints/*/manifest.json")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < stop
            time.sleep(0.05)
        yield process, workdir, options
        if process.poll() is None:
            process.kill()


def test_a_second_run_in_a_workdir_is_refused_and_the_first_goes_on(running):
    first, workdir, options = running
    before = {
        name: (workdir / name).read_bytes()
        for name in ("config.json", "tokenizer.json", "lock.json")
    }
    second = script("train", *options, "--config.checkpoint.every=3")
    refused(
        second,
        f"--workdir={workdir} is in use: process {first.pid} on ",
        "started 20",
        "choose another --workdir",
    )
    assert {name: (workdir / name).read_bytes() for name in before} == before
    newest = max(row["step"] for row in rows(workdir))
    stop = time.monotonic() + 60
    while max(row["step"] for row in rows(workdir)) <= newest:
        assert first.poll() is None
        assert time.monotonic() < stop
    first.terminate()
    assert first.wait(timeout=100) == 75
    assert not (workdir / "lock.json").exists()


def test_after_a_kill_the_next_run_starts_at_once(running, monkeypatch):
    first, workdir, options = running
    first.kill()
    first.wait()
    step = max(
        int(path.parent.name) for path in workdir.glob("checkpoints/*/manifest.json")
    )
    again = script(
        "train",
        *options,
        f"--config.training.steps={step + 1}",
        "--config.checkpoint.every=3",
    )
    said = again.stderr.decode()
    assert again.returncode == 0, said
    assert said.count(f"{workdir}: taken over from process {first.pid} on ") == 1
    assert "for a heartbeat" not in said
    assert f"resumed from step {step}" in said
    assert not (workdir / "lock.json").exists()


def test_a_run_that_has_learned_nothing_yet_keeps_its_tokenizers(tiny, tmp_path):
    """Before the first checkpoint, another config would start over.

    The lock prevents this.
    """
    with held(tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer.json").write_text("{}")
        with unharmed(tmp_path), pytest.raises(InUse):
            experiment.run(tiny, tmp_path)


@pytest.mark.slow
def test_processes_whose_workdirs_are_not_one_folder_are_refused(tmp_path):
    """Each sees another folder under its --workdir.

    All end at the start, not in the first save.
    """
    write_corpus(tmp_path / "corpus")
    (tmp_path / "tiny.py").write_text(
        RECIPE.replace("DIRECTORY", str(tmp_path / "corpus"))
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        str(ROOT / "scripts" / "train.py"),
        f"--config={tmp_path / 'tiny.py'}",
    ]
    command += [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
    started = [
        subprocess.Popen(
            [*command, f"--process_id={i}", f"--workdir={tmp_path / name}"],
            stderr=subprocess.PIPE,
        )
        for i, name in enumerate("ab")
    ]
    for process in started:
        _, told = process.communicate(timeout=300)
        assert process.returncode == 2, told
        assert b"is not the same folder for all processes: process 1 on" in told
