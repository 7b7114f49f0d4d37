"""The one path from a config to a trained and scored run."""

from collections.abc import Sequence
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict

from transformer_jax import workdir as workdirs
from transformer_jax.config import make_task, parse
from transformer_jax.training import lock, processes
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.logging import Listener
from transformer_jax.training.loop import train
from transformer_jax.training.task import Task


class Run(NamedTuple):
    """A finished training: its last state, and the validation scores stored with its last checkpoint."""

    task: Task
    state: TrainState
    scores: dict[str, float]


def run(
    config: ConfigDict, workdir: epath.PathLike, *, trace: range = range(0), listeners: Sequence[Listener] = ()
) -> Run:
    """Train `config` in `workdir` to its end, from the newest good checkpoint if there is one.

    The scores are those stored with the last checkpoint. The steps of `trace` are profiled into `workdir`/profile;
    `listeners` are told every row of metrics.jsonl.
    Raises what `config.parse`, `lock.held`, `workdir.claim` and `training.loop.train` raise.
    """
    workdir = workdirs.place(workdir)
    task = make_task(parse(config), workdir)
    processes.agree("config", config.to_dict)
    with lock.held(workdir):
        processes.first(lambda: workdirs.claim(workdir, config))
        state = train(task, workdir, trace=trace, listeners=listeners, ready=lambda: workdirs.store(workdir, config))
    checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints", task.config.checkpoint)
    return Run(task, state, checkpoints.scores(int(state.step)))
