"""Training objectives, one per file.

`config.task` selects one of them, or one of another package.

A name "module:Name" chooses code to run. It must therefore come from the user: from a
recipe, the command line or an argument. A file may only repeat such a name, see
`is_known`.
"""

import importlib
import typing
from typing import NamedTuple

from transformer_jax.errors import UserError
from transformer_jax.training.task import Config, Task

TASKS = {
    "sequence_to_sequence": (
        "transformer_jax.tasks.sequence_to_sequence:SequenceToSequence"
    ),
    "several_decoders": "transformer_jax.tasks.several_decoders:SeveralDecoders",
    "transcription": "transformer_jax.tasks.transcription:Transcription",
    "language_modeling": "transformer_jax.tasks.language_modeling:LanguageModeling",
    "bert_pretraining": "transformer_jax.tasks.bert_pretraining:BertPretraining",
    "electra_pretraining": (
        "transformer_jax.tasks.electra_pretraining:ElectraPretraining"
    ),
    "denoising": "transformer_jax.tasks.denoising:Denoising",
    "classification": "transformer_jax.tasks.classification:Classification",
    "regression": "transformer_jax.tasks.regression:Regression",
    "multiple_choice": "transformer_jax.tasks.multiple_choice:MultipleChoice",
    "tagging": "transformer_jax.tasks.tagging:Tagging",
    "question_answering": "transformer_jax.tasks.question_answering:QuestionAnswering",
}

# names in configs of models that are not trained → the remedy
NOT_TRAINED = {"ngram": "an n-gram model is counted, not trained: use scripts/ngram.py"}

_named: set[str] = set()  # the names of tasks that `find` has returned


class TaskType(NamedTuple):
    """A task and its config.

    Of a class, the config is the type of the argument `config` of its constructor.
    """

    config: type[Config]
    task: type[Task]


def is_known(name: object) -> bool:
    """Return True for a name that a file may give: one in TASKS, or one that the
    user has given in this process.
    """
    return isinstance(name, str) and (name in TASKS or name in _named)


def find(name: str) -> TaskType:
    """Return a task: a name in TASKS, or "module:Name" of a class or of a `TaskType`.

    The module is imported.

    Raises ValueError for an unknown name, and for a task that cannot be imported.
    """
    if str(name) in NOT_TRAINED:
        raise UserError(
            f"config.task = {name!r} is not a task: {NOT_TRAINED[str(name)]}"
        )
    module, colon, attribute = TASKS.get(str(name), str(name)).partition(":")
    if not colon:
        raise UserError(
            f"config.task = {name!r} is not a task: choose one of {', '.join(TASKS)}, "
            "or name a class of your own, module:Class"
        )
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"config.task = {name!r} cannot be imported: {error}. "
            f"Add the folder that holds {module.partition('.')[0]} to PYTHONPATH, "
            "or install what is missing"
        ) from error
    task = value if isinstance(value, TaskType) else _of_class(name, value)
    _named.add(str(name))
    return task


def _of_class(name: str, value: object) -> TaskType:
    if not (isinstance(value, type) and issubclass(value, Task)):
        raise UserError(
            f"config.task = {name!r} is not a task: "
            f"it must be a subclass of {Task.__module__}.Task"
        )
    config = typing.get_type_hints(value.__init__).get("config")
    if not (isinstance(config, type) and issubclass(config, Config)):
        raise UserError(
            f"config.task = {name!r} does not say what its config is: write "
            "def __init__(self, config: MyConfig, workdir), "
            f"with a subclass of {Config.__module__}.Config"
        )
    return TaskType(config, value)


def task_class(name: str) -> type[Task]:
    """Return the class of a task. For names and errors, see `find`."""
    return find(name).task


def config_class(name: str) -> type[Config]:
    """Return the class of the config of a task. For names and errors, see `find`."""
    return find(name).config


def allow(task: str | type[Task]) -> None:
    """Let a file name this task, the user's own: "module:Name", or the class itself.

    Raises ValueError if the class cannot be imported under its name.
    """
    name = f"{task.__module__}:{task.__qualname__}" if isinstance(task, type) else task
    if task_class(name) is not task and isinstance(task, type):
        raise UserError(
            f"task = {task!r} is another class than {name}: "
            "give the name instead, 'module:Class'"
        )
