"""Stop requests during long work: they are obeyed between steps, in an evaluation,
and while a program compiles.
"""

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

import jax

LOOK = 0.1  # seconds between two looks at a request while a program compiles


# those in which XLA compiles, also if nobody waits for them any more
_threads: list[threading.Thread] = []


class Interrupted(Exception):
    """The run is asked to stop, so an evaluation or a compilation has ended before
    its result.
    """


class Request(Protocol):
    """A request to stop, on which all processes agree."""

    def reached(self, step: int) -> bool:
        """Return True in all processes from the same number on. Numbers increase."""


class Stopping:
    """Answers whether the run should stop.

    All processes must ask equally often, and all get the same answer.
    """

    def __init__(self, request: Request):
        self._request = request
        self._numbers = itertools.count(1)
        self._stop = False

    def __call__(self) -> bool:
        self._stop = self._stop or self._request.reached(next(self._numbers))
        return self._stop

    def check(self) -> None:
        """Raise Interrupted if the run should stop."""
        if self():
            raise Interrupted


def compile_unless(stop: Stopping | None, lowered: jax.stages.Lowered) -> None:
    """Compile a program.

    A single process stops waiting and raises Interrupted if the run should stop
    meanwhile.

    XLA cannot be interrupted: it goes on in its thread. Several processes, which could
    disagree on the moment, wait for the program.
    """
    if stop is None or jax.process_count() > 1:
        lowered.compile()
    else:
        _in_thread(lowered.compile, stop)


def leave(code: int) -> NoReturn:
    """Exit from the script.

    While XLA still compiles in a thread, Python's own exit would abort the process.
    """
    if any(thread.is_alive() for thread in _threads):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _in_thread(action: Callable[[], object], stop: Stopping) -> None:
    failures: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=act, name="compile", daemon=True)
    thread.start()
    _threads.append(thread)
    while thread.is_alive():
        stop.check()
        thread.join(LOOK)
    _threads.remove(thread)
    if failures:
        raise failures[0]
