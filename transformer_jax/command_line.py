"""Flags, messages on stderr and errors without tracebacks, for all scripts."""

import ctypes
import hashlib
import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags
from etils import epath
from ml_collections import ConfigDict

from transformer_jax.config import override
from transformer_jax.training import processes
from transformer_jax.workdir import read

EXIT_ERROR = 2
PATHS = ("workdir", "workdirs", "input", "output", "directory", "manual_dir")

COORDINATOR = flags.DEFINE_string("coordinator_address", None, "of several processes: HOST:PORT of the first")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "how many there are", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "which of them this is, from 0", lower_bound=0)


def run(main: Callable[[], None], argv: list[str] | None = None, distributed: bool = True) -> None:
    """Parse flags and run `main`.

    In a cluster, or with --num_processes, it joins the other processes unless `distributed` is false. An error that a
    user can fix ends as one message on stderr and exit code 2.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("transformer_jax").setLevel(logging.INFO)
    app.define_help_flags()
    keep_freed_memory()
    cache_compilations()
    try:
        try:
            rest = flags.FLAGS(sys.argv if argv is None else argv)[1:]
        except (AttributeError, KeyError, TypeError) as error:
            # ml_collections' words for a wrong --config.key, at times a quoted string within a string.
            words = str(error.args[0]).replace("\\n", "\n").replace("\\'", "'").splitlines()
            raise flags.Error("config key " + "; ".join(word.strip("\"'") for word in words)) from error
        expand_home()
        if rest:
            raise flags.Error(f"{rest[0]!r} is not an option: all are written --name=value; --help names them")
        if distributed:
            processes.initialize(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
            if jax.distributed.is_initialized():
                keep_stdout()
            if not processes.is_first():
                logging.getLogger("transformer_jax").setLevel(logging.WARNING)
        main()
    except (ValueError, OSError, flags.Error) as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        processes.leave(EXIT_ERROR)
    except KeyboardInterrupt:
        processes.leave(130)
    except Exception:
        traceback.print_exc()
        processes.leave(1)


def cache_compilations() -> None:
    """Keep compiled programs in the user's cache directory, up to 1 GiB, so that the next run starts sooner.

    Does nothing where JAX_COMPILATION_CACHE_DIR is set. A program for one CPU may not run on another, and JAX does not
    tell them apart: each kind of machine has its own folder.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind = hashlib.sha256(f"{platform.machine()} {_cpu_features()}".encode()).hexdigest()[:12]
    jax.config.update("jax_compilation_cache_dir", str(cache / "transformer_jax" / f"xla-{kind}"))
    jax.config.update("jax_compilation_cache_max_size", 2**30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def keep_freed_memory() -> None:
    """Keep freed memory in the process, for the next step.

    XLA for CPU allocates a step's temporary arrays anew each time. glibc returns large ones to the system at once,
    which then clears every page again: a sixth of a step's time. Call this before jax starts its threads: with a heap
    for each of them, steps are a fifth slower; with one for all, XLA compiles two programs at a time a third slower
    than with three. With another C library it does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_max, arena_max = -1, -4, -8  # malloc.h
        for option, value in ((trim_threshold, -1), (mmap_max, 0), (arena_max, 3)):
            libc.mallopt(option, value)


def keep_stdout() -> None:
    """Send what C libraries print (e.g. Gloo) to stderr: stdout is for results."""
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding, buffering=1)


def _cpu_features() -> str:
    """Return the processor's features on Linux, its name elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _message(error: Exception) -> str:
    """Return the error's message; of ml_collections' tracebacks, the last line without the class."""
    message = str(error).strip()
    if "Traceback (most recent call last)" in message:
        message = message.splitlines()[-1].partition(": ")[2]
    return message


def expand_home() -> None:
    """Expand ~ in the flags that are paths: the shell does not, after the sign =."""
    for name in flags.FLAGS:
        if name in PATHS and (value := flags.FLAGS[name].value):
            expanded = [os.path.expanduser(path) for path in value] if isinstance(value, list) else None
            flags.FLAGS[name].value = expanded or os.path.expanduser(value)


def check_output(path: str) -> None:
    """Raise ValueError, before long work, where a file of this name has no folder, is one, or may not be written."""
    file = epath.Path(path)
    if "://" not in path and not file.parent.is_dir():  # storage has no folders
        raise ValueError(f"--output={path}: there is no folder {file.parent}; make it or name another")
    if "://" not in path and file.is_dir():
        raise ValueError(f"--output={path}: that is a folder; name a file in it")
    if "://" not in path and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--output={path}: you may not write there; name a file elsewhere")


def split_overrides() -> tuple[list[str], list[str]]:
    """Return the command line's `--config.a.b=v` arguments, and the others."""
    overrides = [argument for argument in sys.argv if argument.startswith("--config.")]
    return overrides, [argument for argument in sys.argv if argument not in overrides]


def run_on_workdir(main: Callable[[ConfigDict], None]) -> None:
    """Like `run`, for a program that takes its config from --workdir and overrides it by `--config.a.b=v`."""
    overrides, argv = split_overrides()
    workdir = flags.DEFINE_string("workdir", None, "the folder of a run", required=True)

    def overridden() -> None:
        config = read(workdir.value)
        override(config, overrides)
        main(config)

    run(overridden, argv)
