"""One file an objective; `config.task` names it."""

import importlib

TASKS = {"translation": "transformer_jax.tasks.translation:Translation"}


def task_class(name: str) -> type:
    """Raises ValueError for an unknown name."""
    if name not in TASKS:
        raise ValueError(f"config.task = {name!r} is not a task: choose one of {', '.join(TASKS)}")
    module, attribute = TASKS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
