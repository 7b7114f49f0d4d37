"""Declare config fields with metadata for the tools: how to shrink them, and what a
change of them affects.
"""

import dataclasses
from typing import Any


def size(
    default: Any,
    small: Any,
    like: str = "",
    free: bool = False,
    is_model: bool = False,
) -> Any:
    """A size.

    Tests and verification set it to `small`; if it equals the field `like`, they keep
    the two equal.

    For a dimension that a mesh shards, `small` is divisible by eight devices. `free`
    means what `fields.free` does. `is_model` marks a size outside the model section
    that defines the model.
    """
    metadata = {"small": small, "like": like}
    if free:
        metadata["free"] = True
    if is_model:
        metadata["model"] = True
    return dataclasses.field(default=default, metadata=metadata)


def how(default: Any, *alternatives: Any) -> Any:
    """A key that changes how a result is computed, but not the result.

    Verification compares the values `alternatives` with the default.
    """
    return dataclasses.field(default=default, metadata={"how": alternatives})


def random(default: Any, off: Any) -> Any:
    """A key that controls randomness in training.

    With the value `off`, no random numbers are drawn.
    """
    return dataclasses.field(default=default, metadata={"off": off})


def outputs(default: Any) -> Any:
    """A key outside the model section that defines the model's outputs, e.g. its
    classes.
    """
    return dataclasses.field(default=default, metadata={"model": True})


def parameters(default: Any) -> Any:
    """A key outside the model section that defines which parameters a checkpoint
    holds, but not the model.
    """
    return dataclasses.field(default=default, metadata={"parameters": True})


def inputs(default: Any) -> Any:
    """A key outside the model section that defines what the model reads."""
    return dataclasses.field(default=default, metadata={"model": True})


def tokenizer(default: Any, compared: bool = True) -> Any:
    """A key that says how text becomes tokens.

    A run that starts from another run has its tokenizers. It takes this key from there,
    and if `compared`, the two must have the same value.
    """
    return dataclasses.field(default=default, metadata={"makes_tokens": compared})


def free(default: Any) -> Any:
    """A key that may change when a run is resumed."""
    return dataclasses.field(default=default, metadata={"free": True})


def path(default: Any, makes_tokenizer: bool = False) -> Any:
    """A file or folder.

    The key may change when a run is resumed. A run stores the absolute path.
    `makes_tokenizer`: a tokenizer is made from the file, so a run that starts from
    another run has no such file.
    """
    metadata = {"free": True, "path": True}
    if makes_tokenizer:
        metadata["makes_tokenizer"] = True
    return dataclasses.field(default=default, metadata=metadata)


def beginning(default: Any) -> Any:
    """A file that a run reads only when it begins.

    The key may not change when a run is resumed, but the file is not needed then. A run
    stores the absolute path.
    """
    return dataclasses.field(default=default, metadata={"path": True})
