r"""Test claims of the literature, each with a verdict, and enter records.

    python scripts/reproduce.py --list
    python scripts/reproduce.py scaling
    python scripts/reproduce.py warmup --seeds=3 --workdir=runs/claims --data=data
    python scripts/reproduce.py --all --jobs=2
    python scripts/reproduce.py my_claim.py
    python scripts/reproduce.py record:scan-26
    python scripts/reproduce.py record:scan-26 --config=mine.py --config.model.d_ff=64

A claim compares conditions, e.g. a model with and without warm-up, each with several
seeds. Its rules were written before it was run, and decide: it holds, does not hold
here, or is undecided. The table goes to stdout, and WORKDIR/CLAIM gets result.json
and result.svg. The same command goes on after a stop.

--quick takes seconds and says nothing about the claim. --scale=paper prints the
commands of the same experiment in the paper's size. --condition with --seed runs one
condition with one seed, e.g. in an array of jobs; the same command without the two
then collects the results.

record:NAME runs the best entry of a record of docs/records.md. With --config=FILE, it
runs your entry. The table of its runs and its row for the board go to stdout, and
WORKDIR/record-NAME gets result.json.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from absl import flags
from ml_collections import ConfigDict

from transformer_jax import claims, command_line, files, records
from transformer_jax.claims import results, running
from transformer_jax.claims.claim import Claim, Setting
from transformer_jax.config import load_recipe, override
from transformer_jax.errors import UserError
from transformer_jax.records import board, entry
from transformer_jax.records.record import Record
from transformer_jax.report.conditions import draw_conditions
from transformer_jax.training import interruption
from transformer_jax.training.loop import Preempted

ROOT = Path(__file__).parents[1]
RECORD = "record:"  # precedes the name of a record
CONFIG = "--config."  # precedes a key of an entry

LIST = flags.DEFINE_bool("list", False, "list the claims and the records")
ALL = flags.DEFINE_bool("all", False, "test all claims")
SEEDS = flags.DEFINE_integer(
    "seeds", None, "number of seeds (default: that of the claim)", lower_bound=1
)
WORKDIR = flags.DEFINE_string("workdir", "runs/claims", "folder of the results")
DATA = flags.DEFINE_string(
    "data", os.environ.get("TRANSFORMER_JAX_DATA", "data"), "folder of the data sets"
)
JOBS = flags.DEFINE_integer(
    "jobs",
    1,
    "number of conditions that run at a time, each on a part of the processors; "
    "each needs memory",
    lower_bound=1,
)
QUICK = flags.DEFINE_bool("quick", False, "only try whether the claim can be tested")
SCALE = flags.DEFINE_enum("scale", "here", ["here", "paper"], "size of the experiment")
CONDITION = flags.DEFINE_string("condition", None, "run only this condition")
SEED = flags.DEFINE_integer("seed", None, "run only this seed", lower_bound=0)


def main(names: Sequence[str], entered: Sequence[str] = ()) -> None:
    """Test the claims `names`, or enter records, with the options `entered`."""
    if LIST.value:
        show_list()
        return
    if ALL.value:
        names = claims.NAMES
    if not names:
        raise UserError("no claim is named: name one, or use --all; --list lists them")
    if entered and not (len(names) == 1 and names[0].startswith(RECORD)):
        raise UserError(f"{entered[0]}: needs one record, e.g. {RECORD}scan-26")
    for name in names:
        if name.startswith(RECORD):
            enter(name, records.find(name.removeprefix(RECORD)), entered)
            continue
        claim = claims.find(name)
        if SCALE.value == "paper":
            print(
                "\n".join(claim.paper or [f"# {name}: there is no larger experiment"])
            )
        else:
            test(name, claim)


def show_list() -> None:
    """Print a line about each claim and each record."""
    for name in claims.NAMES:
        claim = claims.find(name)
        print(f"{name}: {claim.statement} ({claim.source}; {claim.cost})")
    for name in records.NAMES:
        record = records.find(name)
        print(f"{RECORD}{name}: {record.title} ({record.cost})")


def test(name: str, claim: Claim) -> None:
    """Run the conditions of a claim, and print the result."""
    folder = folder_of(Path(name).stem)
    measured = run(name, claim, folder, ())
    if CONDITION.value is not None or SEED.value is not None:
        return
    result = results.judge(claim, measured)
    write(folder, results.to_json(name, result, ROOT))
    draw_conditions(folder / "result.svg", results.by_measure(result))
    print(results.as_text(result))


def enter(name: str, record: Record, entered: Sequence[str]) -> None:
    """Run an entry of a record, and print the result.

    entered: options that define the entry, "--config=FILE" and "--config.KEY=VALUE".
    """
    words, config = entry_of(record, entered)
    claim = entry.as_claim(record, config)
    if JOBS.value == 1:  # otherwise, each job does it
        limit_processors(record.processors)
    folder = folder_of(name.replace(":", "-"))
    measured = run(name, claim, folder, entered)
    if SEED.value is not None:
        return
    runs = [found.values for found in measured[entry.CONDITION]]
    result = board.Result(name, record, words, config, runs)
    write(folder, board.to_json(result, ROOT))
    print(board.as_text(result, ROOT))


def entry_of(record: Record, entered: Sequence[str]) -> tuple[str, ConfigDict]:
    """Return an entry in words, and its config: the best entry without options.

    Raises the errors of `config.load_recipe` and `config.override`.
    """
    recipes = [option for option in entered if option.startswith("--config=")]
    keys = [option for option in entered if not option.startswith("--config=")]
    if recipes:
        recipe = path = recipes[-1].removeprefix("--config=")
    else:
        recipe, path = record.recipe, str(ROOT / "configs" / record.recipe)
        keys = [f"--config.{key}={value}" for key, value in record.keys.items()] + keys
    config = load_recipe(path)
    override(config, keys)
    return " ".join([recipe, *keys]), config


def limit_processors(count: int) -> None:
    """Let this process use at most `count` processors, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def folder_of(name: str) -> Path:
    """Return the folder of the results of a claim or a record."""
    return Path(WORKDIR.value) / (f"{name}-quick" if QUICK.value else name)


def write(folder: Path, values: dict[str, Any]) -> None:
    """Write result.json."""
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    files.write(folder / "result.json", text.encode())


def run(
    name: str, claim: Claim, folder: Path, entered: Sequence[str]
) -> dict[str, list[running.Measured]]:
    """Run the conditions of a claim that were not run before, and return what all of
    them measured.
    """
    seeds = range(SEEDS.value or (1 if QUICK.value else claim.seeds))
    if SEED.value is not None:
        seeds = range(SEED.value, SEED.value + 1)
    given = Setting(
        seed=0,
        workdir=folder,
        runs=Path(WORKDIR.value) / "runs",
        data=Path(DATA.value).absolute(),
        recipes=ROOT / "configs",
        quick=QUICK.value,
    )
    tasks = running.settings_of(claim, folder, seeds, given)
    if CONDITION.value is not None:
        if CONDITION.value not in claim.conditions:
            raise UserError(
                f"--condition={CONDITION.value}: "
                f"choose one of {', '.join(claim.conditions)}"
            )
        tasks = [task for task in tasks if task[0] == CONDITION.value]
    start = functools.partial(started, name, entered)
    return running.measure_all(claim, tasks, start, JOBS.value)


def started(
    name: str, entered: Sequence[str], condition: str, seed: int, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process that runs one condition with one seed."""
    command = [
        sys.executable,
        __file__,
        name,
        *entered,
        f"--condition={condition}",
        f"--seed={seed}",
        f"--workdir={WORKDIR.value}",
        f"--data={DATA.value}",
        f"--{'' if QUICK.value else 'no'}quick",
    ]
    return subprocess.Popen(command, stdout=output, stderr=output)


if __name__ == "__main__":
    script, *arguments = sys.argv
    names = [argument for argument in arguments if not argument.startswith("-")]
    options = [argument for argument in arguments if argument.startswith("-")]
    entered = [option for option in options if option.startswith(("--config=", CONFIG))]
    options = [option for option in options if option not in entered]

    def named() -> None:
        try:
            main(names, entered)
        except Preempted as stopped:
            print(stopped, file=sys.stderr)
            interruption.leave(command_line.EXIT_RUN_AGAIN)

    command_line.run(named, [script, *options], distributed=False, resumable=True)
