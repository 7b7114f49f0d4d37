"""The meaning of the validation scores of a run.

Scores are compared only if they have the same meaning.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from transformer_jax.data.batching import Batches
from transformer_jax.training.task import Config, Task

log = logging.getLogger(__name__)

VALIDATION = "validation data"
# sections that may change in a run but do not affect its scores
NOT_IN_SCORES = ("checkpoint", "mesh")
# keys that evaluations during training do not use
NOT_IN_TRAINING = ("checkpoint", "average_last", "batch_size")


def part(task: Task) -> str:
    """Return the part of the state that is evaluated."""
    return "ema" if task.config.evaluation.checkpoint == "ema" else "params"


def of(task: Task, held_out: Batches) -> dict[str, Any]:
    """Return what the scores on the validation split depend on, besides the
    parameters: JSON values by key.
    """
    config = task.config
    facts = {"scored": part(task), VALIDATION: held_out.sha256()}
    for section in _sections(config):
        values = getattr(config, section)
        for field in dataclasses.fields(values):
            if "how" in field.metadata or field.name in NOT_IN_TRAINING:
                continue
            if section != "data" or {"free", "small"} <= field.metadata.keys():
                facts[f"{section}.{field.name}"] = getattr(values, field.name)
    return json.loads(json.dumps(facts))


def _sections(config: Config) -> list[str]:
    """Return the sections on which scores depend: those that may change in a run, and
    "data", of which only sizes may change.
    """
    free = [x.name for x in dataclasses.fields(config) if x.metadata.get("free")]
    return ["data", *(name for name in free if name not in NOT_IN_SCORES)]


def compare(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> None:
    """Warn if the validation data are not those of the checkpoint at `step`."""
    if old.get(VALIDATION, new[VALIDATION]) != new[VALIDATION]:
        log.warning(
            "the validation data have changed since step %d was saved: "
            "earlier and later scores do not mean the same, "
            "and checkpoint.best_metric compares only those of the new data",
            step,
        )
