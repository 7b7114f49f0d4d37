"""Objectives, one file each. `config.task` names one of them."""

import importlib

from transformer_jax.training.task import Task

TASKS = {
    "sequence_to_sequence": "transformer_jax.tasks.sequence_to_sequence:SequenceToSequence",
    "language_modeling": "transformer_jax.tasks.language_modeling:LanguageModeling",
    "classification": "transformer_jax.tasks.classification:Classification",
}


def task_class(name: str) -> type[Task]:
    """Return the class of a task. Raises ValueError for an unknown name."""
    if name not in TASKS:
        raise ValueError(f"config.task = {name!r} is not a task: choose one of {', '.join(TASKS)}")
    module, attribute = TASKS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
