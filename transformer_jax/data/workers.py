"""Worker processes for long work on text.

They leave signals to the process that started them, and end with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

# Errors of starting processes, e.g. in a script without `if __name__ == "__main__"`, or
# at a limit of the system.
NO_PROCESSES = (BrokenProcessPool, OSError, NotImplementedError)
# A terminal or a scheduler sends these to the workers too. Only the process that
# started them may act on them.
LEFT_TO_PARENT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


@contextlib.contextmanager
def workers(
    count: int, start: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[Callable[..., Future]]:
    """Yield submit(function, *arguments), which calls a function in one of `count`
    processes.

    Each process first calls start(*arguments). If the block raises, e.g. because of a
    signal, they are killed.
    """
    before = {*multiprocessing.active_children()}
    context = multiprocessing.get_context("spawn")  # a fork can hang: JAX has threads
    pool = ProcessPoolExecutor(count, context, _start, (start, *arguments))

    def submit(function: Callable[..., Any], *arguments: Any) -> Future:
        with _blocked():  # a new process inherits this
            return pool.submit(function, *arguments)

    try:
        yield submit
    except BaseException:
        for worker in {*multiprocessing.active_children()} - before:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    numbers = [getattr(signal, name) for name in LEFT_TO_PARENT]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(start: Callable[..., None] | None, *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
