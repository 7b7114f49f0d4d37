"""Log how far long work has come, and what a count of things is called."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

EVERY = 5, 60  # seconds before the first line, and at most between later ones

_running: list[object] = []  # the innermost work comes last, and only it is logged


@contextlib.contextmanager
def telling(words: Callable[[], str]) -> Iterator[None]:
    """Log `words()` while the block runs, first after 5 seconds, then less and less
    often.
    """
    ended = threading.Event()
    me = object()

    def tell() -> None:
        wait, longest = EVERY
        while not ended.wait(wait):
            if _running[-1:] == [me]:
                log.info("%s", words())
            wait = min(2 * wait, longest)

    thread = threading.Thread(target=tell, daemon=True)
    _running.append(me)
    thread.start()
    try:
        yield
    finally:
        _running.remove(me)
        ended.set()
        thread.join()


@contextlib.contextmanager
def progress(
    name: str, total: int = 0, unit: str = "lines"
) -> Iterator[Callable[[int], None]]:
    """Log the progress of work that takes more than a few seconds.

    Args:
        name: the work, e.g. "encoding text".
        total: number of units. 0: the seconds are logged instead.
        unit: the name of several units.

    Yields:
        A function to call with the number of further units that are done.
    """
    start = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done = min(done + count, total)

    def words() -> str:
        if not total:
            return f"{name}: {time.monotonic() - start:.0f} s so far"
        return f"{name}: {done:,} of {total:,} {unit}"

    with telling(words):
        yield advance


def counted(count: int, name: str, plural: str = "") -> str:
    """Return a count with the name of what is counted: "1 example", "1,014
    examples".
    """
    return f"{count:,} {name if count == 1 else plural or name + 's'}"
