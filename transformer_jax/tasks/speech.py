"""The input of a model of speech."""

import dataclasses

from transformer_jax.tasks.inputs import InputConfig


@dataclasses.dataclass(frozen=True)
class SpeechInput(InputConfig):
    """The keys of every input, and those of recordings."""
