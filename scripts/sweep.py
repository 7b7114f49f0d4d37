r"""Train a recipe with every combination of given values, and compare the results.

    python scripts/sweep.py --config=configs/dates.py --workdir=runs/rates \
        --grid='optimizer.learning_rate=1e-3,3e-4;training.seed=0,1,2'
    python scripts/sweep.py --config=configs/dates.py --workdir=runs/rates \
        --grid='optimizer.learning_rate=1e-3,3e-4;training.seed=0,1,2' --launch

Each run is an ordinary folder of a run, WORKDIR/NAME.
The same command goes on after a stop, and keeps the runs that are finished. The table
goes to stdout: mean and standard deviation of the scores on the validation split over
the seeds, and a mark at the best by config.checkpoint.best_metric. WORKDIR/result.json
has the scores of every run.

--launch submits the runs that are not finished as an array of SLURM jobs, each with
scripts/launch/slurm.sbatch. Without sbatch, it prints the command. The command without
--launch then prints the table.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

from absl import flags

from transformer_jax import command_line, files, sweep
from transformer_jax.claims import running
from transformer_jax.claims.claim import Setting
from transformer_jax.errors import UserError
from transformer_jax.training import interruption
from transformer_jax.training.loop import Preempted

ROOT = Path(__file__).resolve().parents[1]
OF_ARRAY = "slurm"  # as --run: the run of SLURM's array task
# options of this script that do not define its runs
OWN = ("launch", "nolaunch", "jobs", "slurm", "run")

CONFIG = command_line.define_recipe()
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the runs", required=True)
GRID = flags.DEFINE_string(
    "grid", None, "values of keys: KEY=VALUE,VALUE;KEY=VALUE,VALUE", required=True
)
JOBS = flags.DEFINE_integer(
    "jobs",
    1,
    "number of runs at a time, each on a part of the processors; each needs memory",
    lower_bound=1,
)
LAUNCH = flags.DEFINE_bool("launch", False, "submit the runs to SLURM")
SLURM = flags.DEFINE_string(
    "slurm", "", "options of sbatch for --launch, e.g. '--gpus=1 --time=2:00:00'"
)
RUN = flags.DEFINE_string("run", None, "train only the run of this name, without table")


def main() -> None:
    if not WORKDIR.value:
        raise UserError("--workdir= is empty: name a folder")
    folder = Path(WORKDIR.value)
    runs = sweep.make_sweep(CONFIG.value, GRID.value, folder)
    try:
        if LAUNCH.value:
            launch(runs)
        elif RUN.value is not None:
            run = chosen(runs)
            running.measure(runs.claim, run.condition, run.setting)
        else:
            finish(runs, folder)
    except Preempted as stopped:
        print(stopped, file=sys.stderr)
        interruption.leave(command_line.EXIT_RUN_AGAIN)


def finish(runs: sweep.Sweep, folder: Path) -> None:
    """Train the runs that are not finished, and print the table."""

    def start(condition: str, seed: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        (name,) = (
            run.name
            for run in runs.runs
            if (run.condition, run.setting.seed) == (condition, seed)
        )
        command = [sys.executable, __file__, *arguments(), f"--run={name}"]
        return subprocess.Popen(command, stdout=output, stderr=output)

    tasks: list[tuple[str, Setting]] = runs.tasks
    measured = running.measure_all(runs.claim, tasks, start, JOBS.value)
    result = sweep.to_json(runs, measured)
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    files.write(folder / "result.json", text.encode())
    print(sweep.as_text(runs, measured), end="")


def arguments() -> list[str]:
    """Return the options on the command line that define the runs."""
    kept = []
    is_value = False
    for argument in sys.argv[1:]:
        name, equals, _ = argument.lstrip("-").partition("=")
        if is_value or (argument.startswith("-") and name in OWN):
            is_value = not is_value and not equals and "launch" not in name
            continue
        kept.append(argument)
    return kept


def chosen(runs: sweep.Sweep) -> sweep.Run:
    """Return the run that --run names."""
    if RUN.value != OF_ARRAY:
        return sweep.single(runs.runs, RUN.value)
    number = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not number.isdecimal() or int(number) >= len(runs.runs):
        raise UserError(
            f"--run={OF_ARRAY}: SLURM_ARRAY_TASK_ID={number} is not the number of a "
            "run: submit the runs with --launch"
        )
    return runs.runs[int(number)]


def launch(runs: sweep.Sweep) -> None:
    """Submit the runs that have no result, or print the command that does it."""
    if Path.cwd() != ROOT:
        raise UserError(f"--launch: the jobs start in this folder, go to {ROOT} first")
    numbers = runs.open_runs()
    if not numbers:
        print("all runs are finished: omit --launch for the table", file=sys.stderr)
        return
    command = [
        "sbatch",
        f"--array={','.join(map(str, numbers))}",
        "--ntasks=1",
        "--export=ALL,SCRIPT=scripts/sweep.py",
        *shlex.split(SLURM.value),
        "scripts/launch/slurm.sbatch",
        *arguments(),
        f"--run={OF_ARRAY}",
    ]
    if shutil.which("sbatch"):
        subprocess.run(command, check=True)
        return
    print(
        f"there is no sbatch on this machine: run this where SLURM is, in {ROOT}",
        file=sys.stderr,
    )
    print(shlex.join(command))


if __name__ == "__main__":
    command_line.run(main, distributed=False, resumable=True)
