"""Start a run from the parameters of another one (`config.init_from`)."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
from etils import epath
from flax import traverse_util
from jax.sharding import Mesh

from transformer_jax import workdir as workdirs
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.evaluation import restore_parameters
from transformer_jax.training.task import Params, Task

log = logging.getLogger(__name__)

SHOWN = 10  # parameters of other shapes that a message lists


def load(task: Task, mesh: Mesh) -> Callable[[Params], Params]:
    """Restore the parameters of the run `config.init_from`, and return a function that puts them into new ones.

    The checkpoint is the one that the other run's evaluation.checkpoint selects. Parameters correspond if they have the
    same path, e.g. "bert/encoder/…". The function logs what was loaded, what is new and what was left out.

    Raises:
        ValueError: the other run cannot be loaded, or has a model with other keys. The function raises it if the other
            run has another tokenizer, no parameter in common with this one, or one of another shape.
    """
    source = task.config.init_from
    stored = workdirs.read(source, "config.init_from")
    try:
        theirs = parse(stored)
    except ConfigError as error:
        raise ConfigError(f"config.init_from = {source!r}, config.json: {error}") from error
    workdirs.check_same_model(source, theirs, task.config)
    _check_tokenizer_keys(source, theirs.data, task.config.data)
    other = make_task(theirs, epath.Path(source))
    checkpoints = Checkpoints(epath.Path(source) / "checkpoints", theirs.checkpoint)
    try:
        step, restored = restore_parameters(other, checkpoints, theirs.evaluation, mesh)
    except ValueError as error:
        raise ConfigError(f"config.init_from = {source!r}: {error}") from error
    old, tokenizers = traverse_util.flatten_dict(restored, sep="/"), other.fingerprint(training=False)

    def change(params: Params) -> Params:
        new = traverse_util.flatten_dict(params, sep="/")
        common = new.keys() & old.keys()
        _check_tokenizers(source, tokenizers, task.fingerprint(training=False))
        _check_shapes(source, old, new, common)
        log.info("initialized from %s, step %d: %s", source, step, _parts(old, common))
        log.info("  new, not in that run: %s", _parts(new, new.keys() - common))
        log.info("  left out, not in this model: %s", _parts(old, old.keys() - common))
        merged = {key: jax.device_put(old[key], leaf.sharding) if key in common else leaf for key, leaf in new.items()}
        return traverse_util.unflatten_dict(merged, sep="/")

    return change


def _check_tokenizer_keys(source: str, theirs: Any, ours: Any) -> None:
    """Raise ConfigError if the data sections ask for different tokenizers. That of the other run is copied."""
    wrong = [
        f"config.data.{name}: {getattr(theirs, name)!r} there, {getattr(ours, name)!r} here"
        for name in ("tokenizer", "lowercase")
        if getattr(theirs, name) != getattr(ours, name)
    ]
    if ours.vocabulary:
        wrong.append(f"config.data.vocabulary = {ours.vocabulary!r}: must be empty")
    if wrong:
        raise ConfigError(
            "\n  ".join([f"config.init_from = {source!r}: its tokenizer is used; set these keys accordingly:", *wrong])
        )


def _check_tokenizers(source: str, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise ConfigError(
                f"config.init_from = {source!r}: {name}: sha256 {old[name][:12]}… there, {new[name][:12]}… here: the "
                "parameters belong to other tokens; let the task copy them, by data.text.Corpus(…, start=init_from)"
            )


def _check_shapes(source: str, old: Mapping[str, Any], new: Mapping[str, Any], common: Set[str]) -> None:
    if not common:
        raise ConfigError(
            f"config.init_from = {source!r}: it has {_parts(old, old.keys())}, and this model has "
            f"{_parts(new, new.keys())}: they have nothing in common; name another run"
        )
    if wrong := [key for key in sorted(common) if old[key].shape != new[key].shape]:
        shown = [f"{key}: {old[key].shape} there, {new[key].shape} here" for key in wrong[:SHOWN]]
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise ConfigError(
            "\n  ".join(
                [
                    f"config.init_from = {source!r} has parameters of other shapes; name a run with the same outputs, "
                    "or the one that it was started from:",
                    *shown,
                    *more,
                ]
            )
        )


def _parts(params: Mapping[str, Any], keys: Set[str]) -> str:
    """Return the top-level modules of `keys` and their numbers of parameters, e.g. "bert (1,234)"."""
    sizes: Counter[str] = Counter()
    for key in keys:
        sizes[key.partition("/")[0]] += params[key].size
    return ", ".join(f"{name} ({size:,})" for name, size in sorted(sizes.items())) or "nothing"
