"""Signals: they end a script within two seconds, or let a training run save its
state first.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

import jax
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)

# SIGHUP is that of a lost terminal, SIGUSR1 one that schedulers send before a time
# limit.
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
STOPS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
PATIENCE = 1.5  # seconds from a signal until a process ends that is busy in a library

_tell_jax: Callable[[int], Any] | None = None  # JAX's own handler of SIGTERM
_training = False  # True while a signal is noted, to stop after the current step
_trained = False  # True from the first step on: ending at once then loses steps


class Stopped(KeyboardInterrupt):
    """A signal has ended the work, and there is nothing to save.

    `number` is the number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def end_on_signals(end: Callable[[int], NoReturn]) -> None:
    """From now on, raise Stopped in the main thread when a signal arrives.

    If the process is still alive PATIENCE seconds later, e.g. because it waits for a
    library, another thread calls `end(number)`. Signals that the process was started to
    ignore stay ignored, e.g. by nohup.
    """
    for number in _heeded():
        signal.signal(number, _stop)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(
        target=_watch, args=(reader, end), name="signals", daemon=True
    ).start()


def _heeded() -> list[signal.Signals]:
    return [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]


def _stop(number: int, _: Any = None) -> NoReturn:
    raise Stopped(number)


def _watch(reader: int, end: Callable[[int], NoReturn]) -> None:
    interrupts = 0
    while True:
        number = os.read(reader, 1)[0]
        if number not in STOPS:
            continue
        interrupts += number == signal.SIGINT
        noted = _training and not (number == signal.SIGINT and interrupts > 1)
        if not noted:
            time.sleep(PATIENCE)
            if not _training or interrupts > 1:
                end(number)


def loses_steps() -> bool:
    """Return True if this process has trained steps, which are lost if it ends at
    once.
    """
    return _trained


def die(number: int) -> NoReturn:
    """End this process and its workers by a signal, from any thread, so that its
    parent sees the signal.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    # 0: the default action. Python allows this in the main thread only.
    ctypes.CDLL(None).signal(number, 0)
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(128 + number)


def keep_from_jax() -> None:
    """Make Python receive SIGTERM again after jax.distributed.initialize, whose own
    handler would swallow it.
    """
    if threading.current_thread() is threading.main_thread():
        _handle(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _handle(number: int, handler: Any) -> Any:
    """Set a handler and return the one before.

    If that is JAX's, which Python does not know, remember it.
    """
    global _tell_jax
    address = _address(number)
    before = signal.signal(number, handler)
    if number == signal.SIGTERM and address not in (0, 1, _address(number)):
        _tell_jax = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)
    return before


def _address(number: int) -> int:
    """Return the address of the C function that handles a signal, 0 for the default
    action, 1 if it is ignored.
    """
    # a struct sigaction, which begins with the address
    action = (ctypes.c_void_p * 64)()
    ctypes.CDLL(None).sigaction(number, None, action)
    return action[0] or 0


class StopRequest:
    """Turns a signal into a request to finish the current step, save it, and stop.

    Until `reached` is called for the first time, there is nothing to save, and a signal
    raises Stopped. A second Ctrl-C always does. With several processes, it is enough to
    signal one of them during training: they agree on a step through JAX's preemption
    service. Outside the main thread, where Python cannot handle signals, the handlers
    are left unchanged.
    """

    def __init__(self) -> None:
        self._received = False
        self._by_jax = jax.distributed.is_initialized()
        self._before: dict[int, Any] = {}

    def reached(self, step: int) -> bool:
        """Return True if the run should stop after this step. Call it at every step."""
        global _trained, _training
        _training = bool(self._before)
        _trained = True
        if self._by_jax:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _heeded():
                self._before[number] = _handle(number, self._receive)
        return self

    def _receive(self, number: int, _: Any) -> None:
        if not _training:
            raise Stopped(number)
        if number == signal.SIGINT:
            signal.signal(number, _stop)
            log.warning(
                "saving the current step, then stopping; "
                "press Ctrl-C again to stop immediately without saving"
            )
        if self._by_jax and _tell_jax is not None:
            _tell_jax(signal.SIGTERM)
        self._received = True

    def __exit__(self, *_: Any) -> None:
        global _training
        _training = False
        for number, handler in self._before.items():
            signal.signal(number, handler)
