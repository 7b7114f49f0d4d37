"""Training objectives, one per file. `config.task` selects one of them, or a class of another package."""

import importlib

from transformer_jax.errors import UserError
from transformer_jax.training.task import Task

TASKS = {
    "sequence_to_sequence": "transformer_jax.tasks.sequence_to_sequence:SequenceToSequence",
    "language_modeling": "transformer_jax.tasks.language_modeling:LanguageModeling",
    "bert_pretraining": "transformer_jax.tasks.bert_pretraining:BertPretraining",
    "classification": "transformer_jax.tasks.classification:Classification",
    "regression": "transformer_jax.tasks.classification:Regression",
    "multiple_choice": "transformer_jax.tasks.multiple_choice:MultipleChoice",
    "tagging": "transformer_jax.tasks.tagging:Tagging",
    "question_answering": "transformer_jax.tasks.question_answering:QuestionAnswering",
}


def task_class(name: str) -> type[Task]:
    """Return the class of a task: a name in TASKS, or "module:Class".

    Raises ValueError for an unknown name, and for a class that cannot be imported.
    """
    module, colon, attribute = TASKS.get(str(name), str(name)).partition(":")
    if not colon:
        raise UserError(
            f"config.task = {name!r} is not a task: choose one of {', '.join(TASKS)}, or name a class of your own, "
            "module:Class"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"config.task = {name!r} cannot be imported: {error}. Add the folder that holds {module.partition('.')[0]} "
            "to PYTHONPATH, or install what is missing"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"config.task = {name!r} is not a task: it must be a subclass of {Task.__module__}.Task")
    return found
