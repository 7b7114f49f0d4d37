"""Models in which some calls are replaced, for ablations.

A change is an interceptor of Flax: `change(call, args, kwargs, context)` is called in
place of every call of a method of a module, and `call(*args, **kwargs)` is the call
that it replaces. See `flax.linen.intercept_methods`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from etils import epath

from transformer_jax.models.layers import Linear
from transformer_jax.tasks.sequence_to_sequence import SequenceToSequence
from transformer_jax.tasks.sequence_to_sequence_config import SequenceToSequenceConfig
from transformer_jax.training.task import Task

Change = Callable[[Any, tuple, dict, Any], Any]


def changed(model: nn.Module, change: Change) -> Any:
    """Return an encoder–decoder whose calls are changed when it is initialized or
    applied.

    Parameters of calls that no longer take place do not exist.
    """
    kind: Any = type(model)

    class Changed(kind):
        @nn.nowrap
        def init(self, *args: Any, **options: Any) -> Any:
            with nn.intercept_methods(change):
                return super().init(*args, **options)

        @nn.nowrap
        def apply(self, *args: Any, **options: Any) -> Any:
            with nn.intercept_methods(change):
                return super().apply(*args, **options)

    whole: Any = model
    return Changed(whole.config, whole.front_end)


def with_change(change: Change) -> type[Task]:
    """Return the task "sequence_to_sequence" with a changed model."""

    class ChangedSequenceToSequence(SequenceToSequence):
        def __init__(
            self, config: SequenceToSequenceConfig, workdir: epath.PathLike | None
        ):
            super().__init__(config, workdir)
            self.model = changed(self.model, change)

    return ChangedSequenceToSequence


def linear_map(context: Any) -> str:
    """Return the name of the linear map that is called, or "": another call."""
    if context.method_name != "__call__" or not isinstance(context.module, Linear):
        return ""
    return context.module.name or ""


def unscaled(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    """Multiply queries by √d_k, which cancels the division of their scores by it.

    Initial parameters are the same as with the division.
    """
    y = call(*args, **kwargs)
    return y * y.shape[-1] ** 0.5 if linear_map(context) == "query" else y
