"""Declare what a config field means to the tools: how to shrink it, whether it may change, whether it is random."""

import dataclasses
from typing import Any


def size(default: Any, small: Any, like: str = "") -> Any:
    """A size. Tests and verification set it to `small`, or keep it equal to the field `like` if it was equal.

    Dimensions that a mesh divides have a `small` that eight devices can divide.
    """
    return dataclasses.field(default=default, metadata={"small": small, "like": like})


def how(default: Any, *others: Any) -> Any:
    """A key that changes how something is computed, not what. Verification compares `others` with the default."""
    return dataclasses.field(default=default, metadata={"how": others})


def random(default: Any, off: Any) -> Any:
    """A key of training's randomness; `off` is the value that draws nothing."""
    return dataclasses.field(default=default, metadata={"off": off})


def outputs(default: Any) -> Any:
    """A key outside of the model's section that names the model's outputs, e.g. its classes."""
    return dataclasses.field(default=default, metadata={"model": True})


def free(default: Any) -> Any:
    """A key that may change when a run goes on."""
    return dataclasses.field(default=default, metadata={"free": True})
