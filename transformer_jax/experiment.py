"""Train a config in a workdir and return the result. All training goes through
`run`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict

from transformer_jax import transfer
from transformer_jax import workdir as workdirs
from transformer_jax.config import make_task, parse
from transformer_jax.training import lock, processes
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.logging import Listener
from transformer_jax.training.loop import train
from transformer_jax.training.task import Task


class Run(NamedTuple):
    """A finished run: its last state, and the validation scores stored with its last
    checkpoint.
    """

    task: Task
    state: TrainState
    scores: dict[str, float]


def run(
    config: ConfigDict,
    workdir: epath.PathLike,
    *,
    trace: range = range(0),
    listeners: Sequence[Listener] = (),
) -> Run:
    """Train `config` in `workdir` to its last step, starting from the newest valid
    checkpoint if there is one.

    The profile of the steps in `trace` is written to `workdir`/profile. `listeners` are
    called with every row of metrics.jsonl. Raises the errors of `config.parse`,
    `lock.held`, `workdir.claim`, `transfer.load` and `training.loop.train`.
    """
    workdir = workdirs.place(workdir)
    config = workdirs.settled(workdir, config)
    task = make_task(parse(config), workdir)
    processes.agree("config", config.to_dict)
    with lock.held(workdir):
        processes.first(lambda: workdirs.claim(workdir, config))
        load = functools.partial(transfer.load, task) if task.config.init_from else None
        ready = functools.partial(workdirs.store, workdir, config)
        state = train(
            task, workdir, trace=trace, listeners=listeners, ready=ready, load=load
        )
    checkpoints = Checkpoints(
        epath.Path(workdir) / "checkpoints", task.config.checkpoint, task.metrics
    )
    return Run(task, state, checkpoints.scores(int(state.step)))
