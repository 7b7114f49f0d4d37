"""Command-line conventions of all scripts: flags, --help, messages on stderr, errors
without tracebacks.
"""

import contextlib
import ctypes
import gc
import hashlib
import itertools
import logging
import multiprocessing
import os
import platform
import re
import signal
import stat
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import filelock
import jax
from absl import flags
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import console
from transformer_jax.config import load_recipe, override
from transformer_jax.data.sources import decode_lines
from transformer_jax.errors import UserError
from transformer_jax.tasks import allow
from transformer_jax.training import memory, processes, signals
from transformer_jax.workdir import name_on_command_line, read

EXIT_ERROR = 2
EXIT_RUN_AGAIN = 75  # EX_TEMPFAIL in sysexits.h
PATHS = (
    "workdir",
    "workdirs",
    "input",
    "output",
    "save",
    "directory",
    "manual_dir",
    "from_huggingface",
    "to_huggingface",
)

COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT of the first process, if there are several"
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "number of processes", lower_bound=1
)
PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "index of this process, from 0", lower_bound=0
)


def run(
    main: Callable[[], None],
    argv: list[str] | None = None,
    distributed: bool = True,
    resumable: bool = False,
) -> None:
    """Parse the flags and run `main`.

    Unless `distributed` is False, this process first joins the others, in a cluster or
    with --num_processes. An error that a user can fix ends in one message on stderr and
    exit code 2, any other in a traceback and exit code 1. A signal ends the process. If
    `resumable`, the exit code is then 75, except during training, where only a second
    Ctrl-C does, without saving.
    """
    console.in_utf8()
    console.prepare()
    signals.end_on_signals(_stop_to_resume if resumable else signals.die)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True
    )
    logging.getLogger("transformer_jax").setLevel(logging.INFO)
    keep_freed_memory()
    collect_garbage_seldom()
    cache_compilations()
    try:
        if asked := {"--help", "-h", "-help", "--helpshort", "--helpfull"} & set(
            sys.argv[1:]
        ):
            print(
                help_text(distributed)
                + (flags.FLAGS.get_help() if "--helpfull" in asked else ""),
                flush=True,
            )
            return
        parse_flags(argv)
        if distributed:
            processes.initialize(
                COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
            )
            if jax.distributed.is_initialized():
                console.keep_results()
            if not processes.is_first():
                logging.getLogger("transformer_jax").setLevel(logging.WARNING)
        main()
        sys.stdout.flush()
    except signals.Stopped as stopped:
        console.end()
        (_stop_to_resume if resumable else signals.die)(stopped.number)
    except Exception as error:
        if message := _remedy(error):
            print(f"error: {message}", file=sys.stderr)
            processes.leave(EXIT_ERROR)
        if processes.peer_has_died(error):
            print(f"error: {processes.PEER_DIED}", file=sys.stderr)
        traceback.print_exc()
        processes.leave(1)


def _stop_to_resume(number: int) -> NoReturn:
    """End at once because of a signal: before the first step, there is nothing to
    save.
    """
    if signals.loses_steps():
        signals.die(number)
    name = signal.Signals(number).name
    print(
        f"stopped by {name} before the first step: "
        "run the same command again to continue",
        file=sys.stderr,
    )
    for worker in multiprocessing.active_children():
        worker.kill()
    console.end()
    os._exit(EXIT_RUN_AGAIN)


def _remedy(error: Exception) -> str:
    """Return the message of an error that the user can fix, or "" for any other."""
    if isinstance(error, UserError | flags.Error):
        return str(error)
    if _no_device(error):
        return (
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}: "
            "JAX finds no such device on this machine. Unset the variable, "
            "set it to cpu, or install JAX for that device (see the README)."
        )
    of_device = isinstance(
        error, jax.errors.JaxRuntimeError
    ) and "RESOURCE_EXHAUSTED" in str(error)
    # a storage service says so too, if it is asked too often
    if isinstance(error, MemoryError) or of_device:
        return memory.exhausted(error)
    return ""


def parse_flags(argv: list[str] | None) -> None:
    """Parse the command line into absl's flags.

    Raises ValueError or flags.Error if it is invalid.
    """
    overrides: list[str] = []
    for argument, after in itertools.pairwise([*sys.argv, ""]):
        if match := re.fullmatch(r"--?workdir(=(.*))?", argument, re.DOTALL):
            name_on_command_line(match[2] if match[1] else after)
    if "config" in flags.FLAGS:
        overrides, argv = split_overrides()
    script, *arguments = sys.argv if argv is None else argv
    # a recipe may open a folder of this task
    arguments.sort(key=lambda argument: not re.match("--?task=", argument))
    try:
        rest = flags.FLAGS([script, *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        raise flags.Error(f"{error}; --help lists all options") from error
    except flags.IllegalFlagValueError as error:
        if isinstance(error.__context__, UserError):
            raise error.__context__ from None
        if missing := re.match(r"flag --(\w+)=None: ", str(error)):
            name = missing[1]
            raise flags.Error(
                f"--{name} is missing ({flags.FLAGS[name].help}); "
                "--help shows an example"
            ) from error
        raise
    expand_home()
    if rest:
        raise flags.Error(
            f"{rest[0]!r} is not an option: write options as --name=value; "
            "--help lists them"
        )
    if overrides and flags.FLAGS.config is None:
        raise flags.Error(
            f"{overrides[0]} changes a key of a recipe: name one with --config=FILE"
        )
    if overrides:
        override(flags.FLAGS.config, overrides)


def help_text(distributed: bool) -> str:
    """Return the text of --help: the docstring of the script, and its options."""
    several = [COORDINATOR.name, NUM_PROCESSES.name, PROCESS_ID.name]
    names = (
        sorted({*_flags_of(__name__)} - {*several})
        + _flags_of(sys.argv[0])
        + several * distributed
    )
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "Options:"]
    for name in names:
        flag = flags.FLAGS[name]
        required = any(
            "other than None" in validator.message for validator in flag.validators
        )
        value = str(flag.default_as_str).strip("'") if flag.default is not None else ""
        default = "required" if required else value and f"default: {value}"
        lines.append(
            f"  --{'[no]' if flag.boolean else ''}{name}{'' if flag.boolean else '=…'}"
        )
        lines += textwrap.wrap(
            f"{flag.help}{default and f' ({default})'}",
            100,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
        )
    if {"config", "workdir", "workdirs"} & set(names):
        lines += [
            "  --config.SECTION.KEY=VALUE",
            (
                "      override a key of the config, "
                "e.g. --config.evaluation.batch_size=8; may be given several times."
            ),
            (
                "      A run's config.json lists all keys with their values; "
                "the config classes document them."
            ),
        ]
    return "\n".join(lines) + "\n"


def _flags_of(module: str) -> list[str]:
    return sorted(flag.name for flag in flags.FLAGS.get_flags_for_module(module))


def _no_device(error: Exception) -> bool:
    """Return True for JAX's error about a missing device in JAX_PLATFORMS. This
    error has no class of its own.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return bool(os.environ.get("JAX_PLATFORMS")) and frames[-1].filename.endswith(
        "xla_bridge.py"
    )


def cache_compilations() -> None:
    """Cache compiled programs in the user's cache directory, up to 1 GiB, so that the
    next run starts sooner.

    Does nothing if JAX_COMPILATION_CACHE_DIR is set, or if the user has no home, as in
    some containers. Each kind of CPU has its own folder: a program for one CPU may not
    run on another, and JAX's cache does not distinguish them.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or not cache.is_absolute():
        return
    kind = hashlib.sha256(
        f"{platform.machine()} {_cpu_features()}".encode()
    ).hexdigest()[:12]
    folder = cache / "transformer_jax" / f"xla-{kind}"
    _remove_torn_programs(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", 2**30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _remove_torn_programs(folder: Path) -> None:
    """Remove programs from JAX's cache that were not written completely, because of a
    kill or a full disk.

    JAX writes KEY-cache and then KEY-atime. As long as one of the latter is missing,
    JAX 0.10 stores no other program (https://github.com/jax-ml/jax/issues/39880). The
    lock is JAX's own. If another process holds it for a second, or the folder cannot be
    written, nothing happens.
    """
    if not folder.is_dir():
        return
    with (
        contextlib.suppress(OSError),
        filelock.FileLock(folder / ".lockfile", timeout=1),
    ):
        for program in folder.glob("*-cache"):
            if not program.with_name(
                program.name.removesuffix("cache") + "atime"
            ).exists():
                program.unlink()


def keep_freed_memory() -> None:
    """Keep freed memory in the process, for the next step.

    XLA for CPU allocates a step's temporary arrays anew each time. By default glibc
    returns large ones to the system, which then clears every page again: a sixth of a
    step's time. Call this before JAX starts its threads. The heap settings have no
    effect with another C library.

    glibc gives threads heaps of their own, here at most three, because XLA compiles two
    programs at a time a third slower with one. Only the main heap can keep arrays
    larger than 64 MiB. So JAX runs programs in the calling thread instead of
    dispatching them to another one.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        # the numbers that malloc.h gives to these options
        trim_threshold = -1
        mmap_max = -4
        arena_max = -8
        for option, value in ((trim_threshold, -1), (mmap_max, 0), (arena_max, 3)):
            libc.mallopt(option, value)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def collect_garbage_seldom() -> None:
    """Run Python's garbage collector after 100,000 new objects instead of 700, and
    never on objects that exist already.

    Tracing a step creates millions of objects that stay. To search them again and again
    would take a tenth of the time until the first step runs.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def _cpu_features() -> str:
    """Return the CPU's feature flags on Linux, and its name elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def expand_home() -> None:
    """Expand ~ in flags that are paths. The shell does not expand it after =."""
    for name in flags.FLAGS:
        if name in PATHS and (value := flags.FLAGS[name].value):
            expanded = (
                [os.path.expanduser(path) for path in value]
                if isinstance(value, list)
                else None
            )
            flags.FLAGS[name].value = expanded or os.path.expanduser(value)


def check_output(
    path: str, source: str | None = None, workdir: str | None = None
) -> None:
    """Raise ValueError if an output file cannot be written, so that a script fails
    before its long work.

    The file may not be a folder, be in a missing folder or lack write permission. It
    may not be the same file as `source`, under any name, nor one of the files of the
    run in `workdir`. "-" stands for stdout, and as `source` for stdin.
    """
    if source is not None and _same_file(source, path):
        raise UserError(
            f"--output={path} is also the input, which would be lost: name another file"
        )
    if path == "-":
        console.check_results()
        return
    file = epath.Path(path)
    if workdir is not None and _belongs_to_run(file, epath.Path(workdir)):
        raise UserError(
            f"--output={path} is a file of the run in {workdir}: name another file"
        )
    if "://" in path:  # object storage has no folders
        return
    if not path:
        raise UserError("--output= is empty: name a file")
    if file.is_dir():
        raise UserError(f"--output={path} is a folder: name a file in it")
    target = epath.Path(os.path.realpath(path))  # a link is followed
    if os.path.islink(target):
        raise UserError(f"--output={path} is a link to itself: name another file")
    if not target.parent.is_dir():
        raise UserError(
            f"--output={path}: there is no folder {target.parent}; "
            "create it, or name another"
        )
    # A regular file is replaced by a new one, for which its folder must be writable. A
    # device or a pipe is written to.
    must_be_writable = []
    if os.path.isfile(target) or not target.exists():
        must_be_writable.append(target.parent)
    if target.exists():
        must_be_writable.append(target)
    if not all(os.access(path, os.W_OK) for path in must_be_writable):
        raise UserError(
            f"--output={path}: no permission to write there; name a file elsewhere"
        )


def _same_file(source: str, output: str) -> bool:
    """Return True if both are the same regular file, also through a link or a
    redirected stdin or stdout.
    """
    if "://" in source or "://" in output:
        return source == output
    try:
        one = os.fstat(0) if source == "-" else os.stat(source)
        other = os.fstat(1) if output == "-" else os.stat(output)
    except OSError:  # one of them does not exist
        return False
    return stat.S_ISREG(one.st_mode) and os.path.samestat(one, other)


def _belongs_to_run(file: epath.Path, workdir: epath.Path) -> bool:
    file, workdir = (
        epath.Path(x if "://" in str(x) else os.path.realpath(x))
        for x in (file, workdir)
    )
    if not file.is_relative_to(workdir) or not file.exists():
        return False
    parts = file.relative_to(workdir).parts
    of_runs = (
        "config.json",
        "metrics.jsonl",
        "tokenizer",
        "checkpoints",
        "events.out.",
    )
    return bool(parts) and parts[0].startswith(
        (*of_runs, "lock.json", "made.json", "wandb.json")
    )


def read_lines(path: str, flag: str = "input") -> list[str]:
    """Return the lines of a file, or of stdin for "-".

    All processes must read the same lines. `flag` is the option that names the file.

    Raises ValueError if the file cannot be read, is not UTF-8, or differs between
    processes.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else epath.Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"--{flag}={path} cannot be read: {error.strerror or error}; "
            "name a text file"
        ) from error
    lines = decode_lines(data, "stdin" if path == "-" else path)
    processes.agree(flag, lambda: lines)
    return lines


class _RecipeParser(flags.ArgumentParser[ConfigDict]):
    """Parser of --config."""

    syntactic_help = "a recipe"

    def parse(self, argument: str) -> ConfigDict:
        return load_recipe(argument)


def define_recipe(required: bool = True) -> flags.FlagHolder[ConfigDict]:
    """Define the flag --config.

    `run` applies the overrides `--config.a.b=v` to its value.
    """
    define_task()
    words = "recipe, configs/NAME.py[:ARG] or NAME[:ARG]"
    return flags.DEFINE(_RecipeParser(), "config", None, words, required=required)


class _TaskParser(flags.ArgumentParser[str]):
    """Parser of --task."""

    syntactic_help = "module:Class"

    def parse(self, argument: str) -> str:
        for name in argument.split(","):
            allow(name)
        return argument


def define_task() -> None:
    """Define the flag --task: tasks of the user's own, which a folder may then name."""
    words = (
        "your own task, module:Class, "
        "if that of a run's folder is not part of transformer_jax; several by commas"
    )
    flags.DEFINE(_TaskParser(), "task", None, words)


def check_length(length: int, words: str, longest: int) -> None:
    """Raise an error, with this limit in words, if --length is more than `longest`."""
    if length > longest:
        raise flags.Error(f"--length={length}: must be at most {words}")


def split_overrides() -> tuple[list[str], list[str]]:
    """Split the command line into its `--config.a.b=v` or `--config.a.b v` arguments
    and the rest.
    """
    overrides: list[str] = []
    rest: list[str] = []
    lacks_value = False
    for argument in sys.argv:
        is_key = re.match(r"--?(no)?config\.", argument) is not None
        is_value = lacks_value and not argument.startswith("--")
        (overrides if is_key or is_value else rest).append(argument)
        lacks_value = is_key and "=" not in argument
    return overrides, rest


def run_on_workdir(
    main: Callable[[ConfigDict], None],
    read_config: Callable[[epath.PathLike], ConfigDict] = read,
) -> None:
    """Run the `main` of a script that reads the config from --workdir and overrides
    it by `--config.a.b=v`.
    """
    overrides, argv = split_overrides()
    define_task()
    workdir = flags.DEFINE_string("workdir", None, "folder of a run", required=True)

    def overridden() -> None:
        config = read_config(workdir.value)
        override(config, overrides)
        main(config)

    run(overridden, argv)
