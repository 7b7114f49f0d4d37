r"""Train a recipe in a workdir, or continue a run that stopped there.

    python scripts/train.py --config=configs/dates.py --workdir=runs/dates \
        --config.training.steps=1300

On SIGTERM or Ctrl-C the run saves a checkpoint and exits with code 75; the same command
continues it. Progress goes to stderr and metrics to WORKDIR/metrics.jsonl, nothing to
stdout.

Several processes started with the same command train together. On TPU pods, SLURM and
MPI they find each other; elsewhere pass --coordinator_address, --num_processes and
--process_id. See scripts/launch.
"""

import shlex
import sys

from absl import flags

from transformer_jax import command_line, experiment, shipped
from transformer_jax.errors import UserError
from transformer_jax.training import interruption, processes
from transformer_jax.training.logging import wandb_listener
from transformer_jax.training.loop import Preempted

CONFIG = command_line.define_recipe()
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "folder for config, tokenizers, checkpoints and metrics",
    required=True,
)
PROFILE = flags.DEFINE_string(
    "profile",
    None,
    "steps to trace for XProf or Perfetto, into WORKDIR/profile, e.g. 20-25",
)
WANDB = flags.DEFINE_string(
    "wandb_project", None, "also log to this Weights & Biases project; needs wandb"
)


def main() -> None:
    trace = traced_steps(PROFILE.value)
    listeners = []
    if WANDB.value and processes.is_first():
        listeners.append(
            wandb_listener(WANDB.value, WORKDIR.value, CONFIG.value.to_dict())
        )
    try:
        run = experiment.run(
            CONFIG.value, WORKDIR.value, trace=trace, listeners=listeners
        )
    except Preempted as stopped:
        if processes.is_first():
            print(stopped, file=sys.stderr)
        interruption.leave(command_line.EXIT_RUN_AGAIN)
    if processes.is_first():
        print(f"trained to step {int(run.state.step)}. Next:", file=sys.stderr)
        workdir = shlex.quote(f"--workdir={WORKDIR.value}")
        evaluate, predict = shipped.script("evaluate"), shipped.script("predict")
        print(f"  {evaluate} {workdir}", file=sys.stderr)
        print(f"  {predict} {workdir} --input=FILE", file=sys.stderr)


def traced_steps(text: str | None) -> range:
    """Parse --profile: "20-25" → range(20, 26). Raises ValueError if it is invalid."""
    if text is None:
        return range(0)
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(
            f"--profile={text}: "
            "write it as FIRST-LAST, with 1 ≤ FIRST ≤ LAST, e.g. 20-25"
        )
    return range(int(first), int(last) + 1)


if __name__ == "__main__":
    command_line.run(main, resumable=True)
