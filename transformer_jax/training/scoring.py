"""The meaning of the validation scores of a run.

Scores are compared only if they have the same meaning.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from transformer_jax.data.batching import Batches
from transformer_jax.training.task import Task

log = logging.getLogger(__name__)

VALIDATION = "validation data"
# of a config; of "data", only sizes that may change in a run
SECTIONS = ("evaluation", "decoding", "answers", "data")
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
    for section in SECTIONS:
        values = getattr(config, section, None)
        if values is None:
            continue
        for field in dataclasses.fields(values):
            if "how" in field.metadata or field.name in NOT_IN_TRAINING:
                continue
            if section != "data" or {"free", "small"} <= field.metadata.keys():
                facts[f"{section}.{field.name}"] = getattr(values, field.name)
    return json.loads(json.dumps(facts))


def compare(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> None:
    """Warn if the validation data are not those of the checkpoint at `step`."""
    if old.get(VALIDATION, new[VALIDATION]) != new[VALIDATION]:
        log.warning(
            "the validation data have changed since step %d was saved: "
            "earlier and later scores do not mean the same, "
            "and checkpoint.best_metric compares only those of the new data",
            step,
        )
