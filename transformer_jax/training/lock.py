"""A lock that lets only one run at a time train in a workdir.

WORKDIR/lock.json names its owner. The lock is valid as long as the owner's process is
alive. On the same machine, the process is identified by its pid and start time; on
another machine, by a heartbeat.

Why not a lock of the library filelock: flock does not reach other hosts on some network
disks, and does not notice that somebody removed the file. SoftFileLease has heartbeats
too, but takes the copy of a workdir in use for the workdir itself, waits for a whole
lease before it refuses, and does not say whom it waits for. Neither works on gs://.
"""

import contextlib
import fcntl
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

import jax
from etils import epath

from transformer_jax import files
from transformer_jax.errors import UserError
from transformer_jax.training import processes
from transformer_jax.training.location import Location, identity

log = logging.getLogger(__name__)

NAME = "lock.json"
HEARTBEAT = 15.0  # seconds between heartbeats
# seconds without a heartbeat after which a run on another machine is considered dead
EXPIRY = 60.0
LOOK = 0.5  # seconds between two reads of another machine's lock
# seconds until every host must see the lock; a network disk may show old content for a
# while
PATIENCE = 60.0
# seconds to wait before checking which of several competing runs has the lock
SETTLE = 1.0
TRIES = 10  # attempts to take a lock that repeatedly disappears
EXIT_LOST = 2


class NotShared(UserError):
    """The workdirs of the hosts are not the same folder."""


class InUse(UserError):
    """Another run is training in the workdir."""


@contextlib.contextmanager
def held(workdir: epath.PathLike) -> Iterator[None]:
    """Hold the lock of `workdir`, which is created if needed.

    In a run with several processes, the first one takes it.

    The lock of a dead run is taken over, with a warning in the log. A run on another
    machine is watched for up to EXPIRY seconds, by this machine's clock. Raises InUse,
    which names the owner, if the owner is alive, UserError if the workdir cannot be
    written, OSError if the disk fails, and NotShared in all processes if one of them
    does not see the lock in its workdir.
    """
    lock = _Lock(epath.Path(workdir))
    try:
        processes.first(lock.take)
        _check_shared(epath.Path(workdir), lock.token)
        yield
    finally:
        lock.release()


def _check_shared(workdir: epath.Path, token: str) -> None:
    """Raise NotShared unless every process reads the token of the first one in the
    workdir.
    """
    if jax.process_count() == 1:
        return
    token = processes.everyone(token)[0]
    until = time.monotonic() + PATIENCE
    while not (seen := _sees(workdir, token)) and time.monotonic() < until:
        time.sleep(LOOK)
    hosts = processes.everyone([seen, platform.node()])
    blind = [
        f"process {i} on {host}" for i, (seen, host) in enumerate(hosts) if not seen
    ]
    if blind:
        raise NotShared(
            f"--workdir={workdir} is not the same folder for all processes: "
            f"{', '.join(blind)} cannot read the {NAME} "
            f"that process 0 on {hosts[0][1]} wrote there. "
            "Choose a folder on a disk that all hosts share, or gs://BUCKET/FOLDER"
        )


def _sees(workdir: epath.Path, token: str) -> bool:
    with contextlib.suppress(OSError):
        return _parse((workdir / NAME).read_text()).get("token") == token
    return False


class _Lock:
    """The lock of one run.

    On file systems, including NFS, the file is created exclusively. Object stores such
    as gs:// offer no exclusive creation through epath. There, a run writes its token,
    waits, and reads the file again: the run whose token is in the file has the lock.
    On file systems, only runs of different machines that take over the same dead run's
    lock at the same time are told apart in the same way: those of one machine take
    turns.

    Two runs can still hold the lock if one was suspended for longer than EXPIRY. The
    run whose token is no longer in the file exits at its next heartbeat and writes
    nothing more.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir = workdir
        self._path = workdir / NAME
        self._remote = "://" in str(workdir)
        self._ended = threading.Event()
        self._beats = 0
        self._contested = False
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._owner = {
            "host": platform.node(),
            "pid": os.getpid(),
            "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            "process_born": _birth(os.getpid()),
            "machine": _machine(),
            "token": secrets.token_hex(8),
        }

    @property
    def token(self) -> str:
        return str(self._owner["token"])

    def take(self) -> None:
        try:
            files.ensure_folder(self._workdir)
            self._owner["folder"] = identity(self._workdir)
            self._location = Location(self._workdir)
            for _ in range(TRIES):
                if self._taken():
                    break
                self._dismiss(self._read())
            else:
                raise UserError(
                    f"--workdir={self._workdir} cannot be written: "
                    f"{self._path} can be neither read nor created; choose another"
                )
        except OSError as error:
            if not files.is_lasting(error):
                raise
            raise UserError(
                f"--workdir={self._workdir} cannot be written: {error}; choose another"
            ) from error
        self._thread.start()

    def release(self) -> None:
        """Remove the lock if this process has it."""
        self._ended.set()
        if self._thread.ident is not None:
            # a heartbeat in progress would write the lock again after its removal
            self._thread.join(EXPIRY)
        # a lock that stays behind is harmless: the next run takes it over
        with contextlib.suppress(Exception):
            if moved := self._location.moved():
                self._path = epath.Path(moved) / NAME
            if self._is_own():
                self._path.unlink(missing_ok=True)
            self._location.close()

    def _taken(self) -> bool:
        """Write the lock if there is none. Return True if this run has it."""
        if not self._write():
            return False
        if self._remote or self._contested:
            time.sleep(SETTLE)
        return self._is_own()

    def _write(self) -> bool:
        """Write the lock. Return False if there already is one."""
        text = json.dumps({**self._owner, "beats": self._beats}, indent=2) + "\n"
        if self._remote:
            if files.exists(self._path) and not self._is_own():
                return False
            self._path.write_text(text)
            return True
        try:
            file = open(self._path, "x")  # noqa: SIM115
        except FileExistsError:
            return False
        try:
            with file:
                file.write(text)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _read(self) -> str | None:
        """Return the text of the lock, or None if there is none."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None

    def _is_own(self) -> bool:
        return _parse(self._read()).get("token") == self._owner["token"]

    def _dismiss(self, text: str | None) -> None:
        """Remove the lock of a dead run. Raise InUse if the run is alive."""
        if text is None:  # released in the meantime
            time.sleep(LOOK)
            return
        owner = _parse(text)
        on_this_machine = owner.get("machine") == self._owner["machine"]
        copied = on_this_machine and owner.get("folder") not in (
            None,
            self._owner["folder"],
        )
        lives: bool | None
        if on_this_machine:
            lives = not copied and _lives(owner["pid"], owner.get("process_born"))
        else:
            lives = self._watch(owner, text)
        if lives is None:
            return
        if lives:
            raise InUse(
                f"--workdir={self._workdir} is in use: "
                f"{_name(owner)} is training there. Wait until it ends, "
                f"stop it (kill {owner.get('pid')}), or choose another --workdir"
            )
        self._contested = True
        if not self._removed(text):
            return
        reason = (
            "which trains in another folder: this is a copy"
            if copied
            else "which is no longer running"
        )
        log.warning("%s: taken over from %s, %s", self._workdir, _name(owner), reason)

    def _removed(self, text: str) -> bool:
        """Remove the lock if it still has this text. Return False if another run has
        taken it over since.

        Runs of one machine come one after the other: nobody replaces the lock between
        the comparison and the removal. Runs of several machines wait, in `_taken`.
        """
        with contextlib.nullcontext() if self._remote else _alone_in(self._workdir):
            if self._read() != text:
                return False
            self._path.unlink(missing_ok=True)
        return True

    def _watch(self, owner: dict[str, Any], text: str) -> bool | None:
        """Return True if the owner, on another machine, is alive, and None if the
        lock has changed hands.
        """
        log.warning(
            "%s: waiting up to %.0f s for a heartbeat of %s",
            self._workdir,
            EXPIRY,
            _name(owner),
        )
        touched = self._touched()
        until = time.monotonic() + EXPIRY
        while time.monotonic() < until:
            time.sleep(LOOK)
            # before `_touched`: opening a file on NFS refreshes its cached times
            now = self._read()
            if _parse(now).get("token") != owner.get("token") or (
                not owner and now != text
            ):
                return None
            if now != text or self._touched() != touched:
                return True
        return False

    def _touched(self) -> float:
        with contextlib.suppress(FileNotFoundError):
            return 0.0 if self._remote else os.stat(self._path).st_mtime
        return 0.0

    def _beat(self) -> None:
        """Renew the heartbeat until the run ends.

        On file systems, only touch the time stamp: the disk may be full.
        """
        while not self._ended.wait(HEARTBEAT):
            # errors of disk or network are reported where results are written
            with contextlib.suppress(Exception):
                # renamed or removed: the loop ends the run
                if identity(self._workdir) != self._owner["folder"]:
                    continue
                text = self._read()
                self._beats = self._beats + 1
                if (
                    _parse(text).get("token", self._owner["token"])
                    != self._owner["token"]
                ):
                    self._end(_parse(text))
                elif text is None or self._remote:
                    self._write()
                else:
                    os.utime(self._path)

    def _end(self, heir: dict[str, Any]) -> None:
        print(
            f"error: --workdir={self._workdir} was taken over by {_name(heir)}; "
            "this run has ended",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_LOST)


@contextlib.contextmanager
def _alone_in(folder: epath.Path) -> Iterator[None]:
    """Wait until no other run of this machine is in this block for the same folder.

    The system ends the wait when a process dies. Where a folder cannot be locked, as on
    some network disks, nobody waits.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _parse(text: str | None) -> dict[str, Any]:
    """Return the owner that a lock names, or {} if there is no lock or it cannot be
    parsed.
    """
    try:
        owner = json.loads(text or "")
        return owner if isinstance(owner["pid"], int) and owner["pid"] > 0 else {}
    except (ValueError, KeyError, TypeError):
        return {}


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown run"
    return (
        f"process {owner['pid']} on {owner.get('host')} "
        f"(started {owner.get('started')})"
    )


def _machine() -> str:
    """Return an identifier of this machine, boot and container, i.e. of the scope in
    which a pid is unique.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def _birth(pid: int) -> str | None:
    """Return the start time of a process on this machine in kernel ticks, "dead" for
    a zombie, or None if unknown.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "dead" if fields[0] in "ZX" else fields[19]


def _lives(pid: int, born: str | None) -> bool:
    """Return True if the process is running on this machine.

    Pids are reused, so `born` must match its start time.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user
        pass
    now = _birth(pid)
    return now is None or born is None or now == born
