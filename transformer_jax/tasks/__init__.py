"""Training objectives, one per file.

`config.task` selects one of them, or a class of another package.

A name "module:Class" chooses code to run. It must therefore come from the user: from a
recipe, the command line or an argument. A file may only repeat such a name, see
`is_known`.
"""

import importlib

from transformer_jax.errors import UserError
from transformer_jax.training.task import Task

TASKS = {
    "sequence_to_sequence": (
        "transformer_jax.tasks.sequence_to_sequence:SequenceToSequence"
    ),
    "language_modeling": "transformer_jax.tasks.language_modeling:LanguageModeling",
    "bert_pretraining": "transformer_jax.tasks.bert_pretraining:BertPretraining",
    "classification": "transformer_jax.tasks.classification:Classification",
    "regression": "transformer_jax.tasks.classification:Regression",
    "multiple_choice": "transformer_jax.tasks.multiple_choice:MultipleChoice",
    "tagging": "transformer_jax.tasks.tagging:Tagging",
    "question_answering": "transformer_jax.tasks.question_answering:QuestionAnswering",
}

_named: set[str] = set()  # the names of classes that `task_class` has returned


def is_known(name: object) -> bool:
    """Return True for a name that a file may give: one in TASKS, or one that the
    user has given in this process.
    """
    return isinstance(name, str) and (name in TASKS or name in _named)


def task_class(name: str) -> type[Task]:
    """Return the class of a task: a name in TASKS, or "module:Class".

    The module is imported.

    Raises ValueError for an unknown name, and for a class that cannot be imported.
    """
    module, colon, attribute = TASKS.get(str(name), str(name)).partition(":")
    if not colon:
        raise UserError(
            f"config.task = {name!r} is not a task: choose one of {', '.join(TASKS)}, "
            "or name a class of your own, module:Class"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"config.task = {name!r} cannot be imported: {error}. "
            f"Add the folder that holds {module.partition('.')[0]} to PYTHONPATH, "
            "or install what is missing"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(
            f"config.task = {name!r} is not a task: "
            f"it must be a subclass of {Task.__module__}.Task"
        )
    _named.add(str(name))
    return found


def allow(task: str | type[Task]) -> None:
    """Let a file name this task, the user's own: "module:Class", or the class itself.

    Raises ValueError if the class cannot be imported under its name.
    """
    name = f"{task.__module__}:{task.__qualname__}" if isinstance(task, type) else task
    if task_class(name) is not task and isinstance(task, type):
        raise UserError(
            f"task = {task!r} is another class than {name}: "
            "give the name instead, 'module:Class'"
        )
