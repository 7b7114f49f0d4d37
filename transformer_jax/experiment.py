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
from transformer_jax.training import lock, memory, processes
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.engine import Engine
from transformer_jax.training.initialization import TrainState, initial_parameters
from transformer_jax.training.logging import Listener
from transformer_jax.training.loop import train
from transformer_jax.training.task import Params, Task


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
    `lock.held`, `workdir.claim`, `transfer` and `training.loop.train`.
    """
    workdir = workdirs.path_of(workdir)
    config = workdirs.settled(workdir, config)
    task = make_task(parse(config), workdir)
    processes.agree("config", config.to_dict)
    with lock.held(workdir):
        processes.first(lambda: workdirs.claim(workdir, config))
        engine = Engine(task)
        memory.check_fits(task.config, engine.abstract_state)
        starts = bool(task.config.init_from or task.config.given_tables)
        if starts and _checkpoints(task, workdir).newest() is not None:
            starts = False  # it goes on
        state = train(
            engine,
            workdir,
            initial=_initial(engine) if starts else None,
            trace=trace,
            listeners=listeners,
            ready=functools.partial(workdirs.store, workdir, config),
        )
    scores = _checkpoints(task, workdir).scores(int(state.step))
    return Run(task, state, scores)


def _checkpoints(task: Task, workdir: epath.Path) -> Checkpoints:
    return Checkpoints(workdir / "checkpoints", task.config.checkpoint, task.metrics)


def _initial(engine: Engine) -> Params:
    """Return the parameters of a new run that starts from `config.init_from`, or with
    rows from files.
    """
    task = engine.task
    transfer.check_files(task)
    source = None
    if task.config.init_from:
        source = transfer.source_of(task, engine.mesh)
    # the first process copies or trains the tokenizers
    processes.first_then_others(lambda: task.fingerprint(training=False))
    params = initial_parameters(task, engine.mesh)
    if source is not None:
        params = transfer.merge(task, source, params)
    return transfer.with_files(task, params)
