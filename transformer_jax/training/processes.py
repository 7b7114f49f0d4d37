"""Coordination of several processes: start-up, actions of the first process and
agreement checks.

Everything also works in a single process, where no coordination takes place.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from transformer_jax import console
from transformer_jax.errors import UserError
from transformer_jax.training import signals

# seconds the first process waits before exiting, which aborts the others, so they can
# print errors
LAST_WORDS = 2
# seconds without a heartbeat until the others give up; JAX's default of 100 keeps dead
# jobs too long
HEARTBEAT = 10


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Connect to the other processes. Must run before any use of a device.

    Without arguments, JAX detects the cluster on TPU pods, SLURM, Kubernetes and MPI;
    elsewhere, the process runs alone. Raises ValueError if only some of the arguments
    are given.
    """
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise UserError(
            f"--{missing[0]} is missing: "
            f"set all of {', '.join(f'--{name}' for name in given)}, or none"
        )
    if coordinator_address is not None and not re.fullmatch(
        r".+:\d{1,5}", coordinator_address
    ):
        raise UserError(
            f"--coordinator_address={coordinator_address}: "
            "write it as HOST:PORT, e.g. 10.0.0.1:8476"
        )
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except ValueError as error:
        # otherwise: no cluster detected
        if not missing or "coordinator_address" not in str(error):
            raise
    signals.keep_from_jax()


def leave(code: int) -> NoReturn:
    """Exit immediately after a failure.

    JAX's own shutdown would wait for processes that wait for this one.
    """
    console.end()
    if not jax.distributed.is_initialized():
        sys.exit(code)
    try:
        time.sleep(LAST_WORDS * is_first())
    finally:
        os._exit(code)


PEER_DIED = (
    "another process of this run has died or cannot be reached, so this one "
    "cannot go on. Start all processes again; the launchers in scripts/launch do so. "
    "The messages of the other process say why it died."
)


def peer_has_died(error: BaseException) -> bool:
    """Return True for the errors of JAX in a process that has lost another one."""
    texts = (
        "gloo|all-?reduce|coordination|heartbeat|barrier|connection "
        "(closed|reset)|socket closed|unavailable"
    )
    raised_by_jax = isinstance(
        error, jax.errors.JaxRuntimeError | ValueError | RuntimeError
    )
    return (
        jax.distributed.is_initialized()
        and raised_by_jax
        and bool(re.search(texts, str(error), re.IGNORECASE))
    )


def is_first() -> bool:
    """Return True in the first process, the only one that writes shared files."""
    return jax.process_index() == 0


def first(action: Callable[[], Any]) -> None:
    """Run `action` in the first process while the others wait.

    If it fails, every process raises an error. In the other processes this is a
    UserError if it is one in the first process, otherwise a RuntimeError.
    """
    failure: Exception | None = None
    if is_first():
        try:
            action()
        except Exception as error:
            failure = error
    outcomes = (None, UserError, RuntimeError)
    outcome = 0
    if failure is not None:
        outcome = 1 if isinstance(failure, UserError) else 2
    if jax.process_count() > 1:
        outcome = int(multihost_utils.broadcast_one_to_all(np.int32(outcome)))
    if failure is not None:
        raise failure
    if kind := outcomes[outcome]:
        raise kind("process 0 has failed: see its error message")


def first_then_others(action: Callable[[], Any]) -> None:
    """Run `action` in the first process, and then in the others."""
    first(action)
    if not is_first():
        action()


def everyone(value: Any) -> list[Any]:
    """Return the values of all processes, in order.

    They are JSON values and may differ.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [
        json.loads(bytes(row[:length]))
        for row, length in zip(texts, lengths, strict=True)
    ]


def first_says(find: Callable[[], Any]) -> Any:
    """Run `find` in the first process and return its result, a JSON value, in all.

    Raises the errors of `first`.
    """
    answers: list[Any] = [None]

    def ask() -> None:
        answers[0] = find()

    first(ask)
    return everyone(answers[0])[0]


def any_says(words: str) -> str:
    """Return "" if `words` is empty in every process, otherwise a non-empty message in
    every process.

    A process returns its own `words`, or "in process N" if they are empty, where N is
    the first process that has some.
    """
    if jax.process_count() == 1:
        return words
    whose = multihost_utils.process_allgather(np.bool_(bool(words)))
    return (words or f"in process {int(whose.argmax())}") if whose.any() else ""


def agree(name: str, value: Callable[[], Any]) -> None:
    """Raise ValueError in all processes if `value()`, a JSON value, is not the same
    in all of them.

    `name` says in the message what the value is, e.g. "checkpoints".
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(json.dumps(value(), sort_keys=True).encode()).digest()
    everyone = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    differing = [i for i, each in enumerate(everyone) if (each != everyone[0]).any()]
    if differing:
        raise UserError(
            f"process {', '.join(map(str, differing))} "
            f"of {len(everyone)} differs from process 0 in its {name}: "
            "start all processes with the same command and the same files"
        )
