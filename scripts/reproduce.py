r"""Test claims of the literature, each with a verdict.

    python scripts/reproduce.py --list
    python scripts/reproduce.py scaling
    python scripts/reproduce.py warmup --seeds=3 --workdir=runs/claims --data=data
    python scripts/reproduce.py --all --jobs=2
    python scripts/reproduce.py my_claim.py

A claim compares conditions, e.g. a model with and without warm-up, each with several
seeds. Its rules were written before it was run, and decide: it holds, does not hold
here, or is undecided. The table goes to stdout, and WORKDIR/CLAIM gets result.json
and result.svg. The same command goes on after a stop.

--quick takes seconds and says nothing about the claim. --scale=paper prints the
commands of the same experiment in the paper's size. --condition with --seed runs one
condition with one seed, e.g. in an array of jobs; the same command without the two
then collects the results.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from absl import flags

from transformer_jax import claims, command_line, files
from transformer_jax.claims import results, running
from transformer_jax.claims.claim import Claim, Setting
from transformer_jax.errors import UserError
from transformer_jax.report.conditions import draw_conditions
from transformer_jax.training import interruption
from transformer_jax.training.loop import Preempted

ROOT = Path(__file__).parents[1]

LIST = flags.DEFINE_bool("list", False, "list the claims")
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


def main(names: Sequence[str]) -> None:
    if LIST.value:
        for name in claims.NAMES:
            claim = claims.find(name)
            print(f"{name}: {claim.statement} ({claim.source}; {claim.cost})")
        return
    if ALL.value:
        names = claims.NAMES
    if not names:
        raise UserError("no claim is named: name one, or use --all; --list lists them")
    for name in names:
        claim = claims.find(name)
        if SCALE.value == "paper":
            print(
                "\n".join(claim.paper or [f"# {name}: there is no larger experiment"])
            )
        else:
            test(name, claim)


def test(name: str, claim: Claim) -> None:
    """Run the conditions of a claim, and print the result."""
    seeds = range(SEEDS.value or (1 if QUICK.value else claim.seeds))
    if SEED.value is not None:
        seeds = range(SEED.value, SEED.value + 1)
    folder = Path(WORKDIR.value) / Path(name).stem
    if QUICK.value:
        folder = folder.with_name(f"{folder.name}-quick")
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
    start = functools.partial(started, name)
    measured = running.measure_all(claim, tasks, start, JOBS.value)
    if CONDITION.value is not None or SEED.value is not None:
        return
    result = results.judge(claim, measured)
    values = results.to_json(name, result, ROOT)
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    files.write(folder / "result.json", text.encode())
    draw_conditions(folder / "result.svg", results.by_measure(result))
    print(results.as_text(result))


def started(
    name: str, condition: str, seed: int, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process that runs one condition with one seed."""
    command = [
        sys.executable,
        __file__,
        name,
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

    def named() -> None:
        try:
            main(names)
        except Preempted as stopped:
            print(stopped, file=sys.stderr)
            interruption.leave(command_line.EXIT_RUN_AGAIN)

    command_line.run(named, [script, *options], distributed=False, resumable=True)
