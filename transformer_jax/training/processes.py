"""Several processes, one program: how they find each other, what one does for all, what all must agree on.

Everything may be used in a single process too; then it does nothing but the work.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)

LAST_WORDS = 2  # seconds that the first process, whose end aborts the others, leaves them for theirs
HEARTBEAT = 10  # seconds without a sign of life until the others give up; 100, JAX's own, holds a dead job too long


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the other processes; must run before anything touches a device.

    Without arguments JAX finds them itself on TPU pods, SLURM, Kubernetes and MPI; elsewhere there are none. Raises
    ValueError when only some are given.
    """
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(f"--{missing[0]} is missing: give {', '.join(f'--{name}' for name in given)}, or none of them")
    if coordinator_address is not None and not re.fullmatch(r".+:\d{1,5}", coordinator_address):
        raise ValueError(f"--coordinator_address={coordinator_address}: write it as HOST:PORT, e.g. 10.0.0.1:8476")
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT)
    except ValueError as error:
        if not missing or "coordinator_address" not in str(error):  # which says that it found no cluster
            raise


def leave(code: int) -> NoReturn:
    """Ends this process, failed, at once: JAX's own farewell waits for the others, who wait for this one."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads on: what is left is for nobody, Python's last flush too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not jax.distributed.is_initialized():
        sys.exit(code)
    try:
        time.sleep(LAST_WORDS * is_first())
    finally:
        os._exit(code)


def is_first() -> bool:
    """Return True in the one process that writes shared files."""
    return jax.process_index() == 0


def first(action: Callable[[], Any]) -> None:
    """`action` in the first process; the others wait until it is done. If it fails there, an error of like kind in all:
    ValueError for what a user can mend, else RuntimeError."""
    failure: Exception | None = None
    if is_first():
        try:
            action()
        except Exception as error:
            failure = error
    kind = 0 if failure is None else 1 if isinstance(failure, ValueError | OSError) else 2
    if jax.process_count() > 1:
        kind = int(multihost_utils.broadcast_one_to_all(np.int32(kind)))
    if failure is not None:
        raise failure
    if kind:
        raise (ValueError if kind == 1 else RuntimeError)("process 0 has failed: its message says why")


def first_then_others(action: Callable[[], Any]) -> None:
    """`action` in the first process; when it is done, in the others."""
    first(action)
    if not is_first():
        action()


def first_says(find: Callable[[], int | None]) -> int | None:
    """Return in all processes what `find` returns in the first: a number ≥ 0, or None."""
    found = find() if is_first() else None
    if jax.process_count() > 1:
        number = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if found is None else found)))
        found = None if number < 0 else number
    return found


def any_says(words: str) -> str:
    """Return, in all processes, the words of the first process that has some, "" where none has."""
    if jax.process_count() == 1:
        return words
    whose = multihost_utils.process_allgather(np.bool_(bool(words)))
    return (words or f"in process {int(whose.argmax())}") if whose.any() else ""


def agree(what: str, value: Callable[[], Any]) -> None:
    """Raises ValueError, in all, when `value()`, JSON, is another in a process than in the first."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(json.dumps(value(), sort_keys=True).encode()).digest()
    everyone = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    others = [i for i, theirs in enumerate(everyone) if (theirs != everyone[0]).any()]
    if others:
        raise ValueError(
            f"process {', '.join(map(str, others))} of {len(everyone)} has other {what} than process 0: give all the "
            "same command, and the same files"
        )


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a request: the step under way is finished and saved.

    The second Ctrl-C ends the process at once. Of several processes one may be asked: they agree on a step by JAX's own
    service, which listens for SIGTERM from `initialize` on. In a thread, where Python takes no signals, the signals do
    what they did before.
    """

    def __init__(self) -> None:
        self._received, self._by_jax = False, jax.distributed.is_initialized()
        self._before: dict[int, Any] = {}

    def reached(self, step: int) -> bool:
        """Return True if the run should stop after this step. Call it at every step."""
        if self._by_jax:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if not self._by_jax:
                self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._receive)
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as for a shell's background jobs
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def _receive(self, *_: Any) -> None:
        self._received = True

    def _interrupted(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after the step under way, and saving it; Ctrl-C again ends at once, without saving")
        if self._by_jax:
            signal.raise_signal(signal.SIGTERM)
        self._received = True

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
