"""The lock of a workdir: one run at a time trains there.

WORKDIR/lock.json names its owner. The owner's process decides whether the lock still holds: on the same machine it is
looked up by its number and its time of birth; on another one it shows by a heartbeat that it lives.
"""

import contextlib
import json
import logging
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etils import epath

from transformer_jax.training import processes

log = logging.getLogger(__name__)

NAME = "lock.json"
HEARTBEAT = 15.0  # seconds between signs of life
EXPIRY = 60.0  # seconds without one, after which a run on another machine counts as dead
LOOK = 0.5  # seconds between looks at another machine's lock
SETTLE = 1.0  # seconds in which two that take the same lock at the same time find out about each other
TRIES = 10  # to get hold of a lock that vanishes again and again
EXIT_LOST = 2


class InUse(ValueError):
    """Another run trains in the workdir."""


@contextlib.contextmanager
def held(workdir: epath.PathLike) -> Iterator[None]:
    """Hold the lock of `workdir`, which is made if it is not there. Of several processes of a run the first takes it.

    A lock whose run has died is taken over, and the log says so. A run on another machine is watched for up to EXPIRY
    seconds, by this machine's clock. Raises InUse, naming the owner, if it lives; ValueError if nothing can be written.
    """
    lock = _Lock(epath.Path(workdir))
    try:
        processes.first(lock.take)
        yield
    finally:
        lock.release()


class _Lock:
    """The lock of one run.

    On disks, NFS among them, making the file is exclusive. Object stores such as gs:// have no exclusive creation
    through epath: there a run writes its token, waits, and reads whose token is there. The same decides between runs
    that take over a dead one's lock together. If two still hold it, because one was suspended for longer than EXPIRY,
    the one whose token has gone ends at its next heartbeat and writes nothing more.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir, self._path, self._remote = workdir, workdir / NAME, "://" in str(workdir)
        self._ended, self._beats, self._contested = threading.Event(), 0, False
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._owner = {
            "host": platform.node(),
            "pid": os.getpid(),
            "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            "process_born": _birth(os.getpid()),
            "machine": _machine(),
            "token": secrets.token_hex(8),
        }

    def take(self) -> None:
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            for _ in range(TRIES):
                if self._taken():
                    break
                self._dismiss(self._read())
            else:
                raise OSError(f"{self._path} can be neither read nor made")
        except OSError as error:
            raise ValueError(f"--workdir={self._workdir} cannot be written: {error}; choose another") from error
        self._thread.start()

    def release(self) -> None:
        """Remove the lock, if this process has it."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(HEARTBEAT)
        with contextlib.suppress(Exception):  # the run has ended, however: a dead run's lock is taken over
            if self._is_own():
                self._path.unlink(missing_ok=True)

    def _taken(self) -> bool:
        """Write the lock if there is none. Return whether it is this run's."""
        if not self._write():
            return False
        if self._remote or self._contested:
            time.sleep(SETTLE)
        return self._is_own()

    def _write(self) -> bool:
        """Return False where there is a lock already."""
        text = json.dumps({**self._owner, "beats": self._beats}, indent=2) + "\n"
        if self._remote:
            if self._path.exists() and not self._is_own():
                return False
            self._path.write_text(text)
            return True
        try:
            with open(self._path, "x") as file:
                file.write(text)
        except FileExistsError:
            return False
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _read(self) -> str | None:
        """Return the text of the lock, None if there is none."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None

    def _is_own(self) -> bool:
        return _parse(self._read()).get("token") == self._owner["token"]

    def _dismiss(self, text: str | None) -> None:
        """Remove the lock of a run that has died. Raise InUse if it lives."""
        if text is None:  # released meanwhile
            time.sleep(LOOK)
            return
        owner = _parse(text)
        here = owner.get("machine") == self._owner["machine"]
        lives = _lives(owner["pid"], owner.get("process_born")) if here else self._watch(owner, text)
        if lives is None:
            return
        if lives:
            raise InUse(
                f"--workdir={self._workdir} is in use: {_name(owner)} trains there. Wait until it ends, stop it "
                f"(kill {owner.get('pid')}), or choose another --workdir"
            )
        log.warning("%s: taken over from %s which no longer runs", self._workdir, _name(owner))
        self._path.unlink(missing_ok=True)
        self._contested = True

    def _watch(self, owner: dict[str, Any], text: str) -> bool | None:
        """Return whether the owner, on another machine, gives a sign of life; None where the lock has changed hands."""
        log.warning("%s: %s had it last; waiting up to %.0f s for a sign of life", self._workdir, _name(owner), EXPIRY)
        touched, until = self._touched(), time.monotonic() + EXPIRY
        while time.monotonic() < until:
            time.sleep(LOOK)
            now = self._read()  # before `_touched`: opening a file on NFS brings its times up to date
            if _parse(now).get("token") != owner.get("token") or (not owner and now != text):
                return None
            if now != text or self._touched() != touched:
                return True
        return False

    def _touched(self) -> float:
        with contextlib.suppress(FileNotFoundError):
            return 0.0 if self._remote else os.stat(self._path).st_mtime
        return 0.0

    def _beat(self) -> None:
        """Show that this run lives, until it ends. On disks no byte is written: they may be full."""
        while not self._ended.wait(HEARTBEAT):
            with contextlib.suppress(Exception):  # a failing disk or network is for those to tell who write results
                text, self._beats = self._read(), self._beats + 1
                if _parse(text).get("token", self._owner["token"]) != self._owner["token"]:
                    self._end(_parse(text))
                elif text is None or self._remote:
                    self._write()
                else:
                    os.utime(self._path)

    def _end(self, heir: dict[str, Any]) -> None:
        print(
            f"error: --workdir={self._workdir} was taken over by {_name(heir)} ended here", file=sys.stderr, flush=True
        )
        os._exit(EXIT_LOST)


def _parse(text: str | None) -> dict[str, Any]:
    """Return the owner that a lock names; {} where there is none, or the lock is torn."""
    try:
        owner = json.loads(text or "")
        return owner if isinstance(owner["pid"], int) and owner["pid"] > 0 else {}
    except (ValueError, KeyError, TypeError):
        return {}


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown run"
    return f"process {owner['pid']} on {owner.get('host')}, started {owner.get('started')},"


def _machine() -> str:
    """Return what tells machines, their boots and their containers apart: where a process number means one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def _birth(pid: int) -> str | None:
    """Return when a process of this machine was born, in the kernel's ticks; "dead" for one that only waits to be
    buried; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "dead" if fields[0] in "ZX" else fields[19]


def _lives(pid: int, born: str | None) -> bool:
    """Return whether this very process runs on this machine: numbers are used again, `born` tells processes apart."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    now = _birth(pid)
    return now is None or born is None or now == born
