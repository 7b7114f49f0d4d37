"""Train a recipe in a workdir, or continue where an earlier run of it stopped.

    python scripts/train.py --config=configs/dates.py --workdir=runs/dates --config.training.steps=1300

After SIGTERM or Ctrl-C it saves and ends with exit code 75; the same command continues. Several processes that are
given the same command train together. On TPU pods, SLURM and MPI they find one another; elsewhere give
--coordinator_address, --num_processes and --process_id. See scripts/launch.
"""

import sys

from absl import flags

from transformer_jax import command_line, experiment
from transformer_jax.training import processes
from transformer_jax.training.logging import wandb_listener
from transformer_jax.training.loop import Preempted

CONFIG = command_line.define_recipe()
WORKDIR = flags.DEFINE_string("workdir", None, "folder for config, tokenizers, checkpoints, metrics", required=True)
PROFILE = flags.DEFINE_string("profile", None, "steps to trace into WORKDIR/profile, e.g. 20-25, for XProf or Perfetto")
WANDB = flags.DEFINE_string("wandb_project", None, "also tell Weights & Biases, if wandb is installed")
EXIT_RUN_AGAIN = 75  # EX_TEMPFAIL of sysexits.h


def main() -> None:
    trace = traced_steps(PROFILE.value)
    listeners = []
    if WANDB.value and processes.is_first():
        listeners.append(wandb_listener(WANDB.value, WORKDIR.value, CONFIG.value.to_dict()))
    try:
        run = experiment.run(CONFIG.value, WORKDIR.value, trace=trace, listeners=listeners)
    except Preempted as stopped:
        if processes.is_first():
            print(stopped, file=sys.stderr)
        sys.exit(EXIT_RUN_AGAIN)
    if processes.is_first():
        print(f"trained to step {int(run.state.step)}. Next:", file=sys.stderr)
        print(f"  python scripts/evaluate.py --workdir={WORKDIR.value}", file=sys.stderr)
        print(f"  python scripts/predict.py --workdir={WORKDIR.value} --input=FILE", file=sys.stderr)


def traced_steps(text: str | None) -> range:
    """ "20-25" → range(20, 26). Raises ValueError for anything else."""
    if text is None:
        return range(0)
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ValueError(f"--profile={text}: write it as FIRST-LAST, two steps, e.g. 20-25")
    return range(int(first), int(last) + 1)


if __name__ == "__main__":
    command_line.run(main)
