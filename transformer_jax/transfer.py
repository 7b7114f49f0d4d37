"""Start a run from the parameters of another one (`config.init_from`)."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from flax import traverse_util
from jax.sharding import Mesh

from transformer_jax import workdir as workdirs
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.evaluation import restore_parameters
from transformer_jax.training.task import Config, Params

log = logging.getLogger(__name__)


def load_into(params: Params, config: Config, mesh: Mesh) -> Params:
    """Return new parameters, with those that the run `config.init_from` also has replaced by its values.

    Parameters correspond if they have the same path, e.g. "bert/encoder/…". The checkpoint is the one that the
    other run's evaluation.checkpoint selects. The log says what was loaded, what is new and what was left out.

    Raises:
        ValueError: the other run cannot be loaded, has no parameter in common with this one, or has a model of another
            shape or with other keys.
    """
    source = config.init_from
    try:
        theirs = parse(workdirs.read(source))
        task = make_task(theirs, epath.Path(source))
        checkpoints = Checkpoints(epath.Path(source) / "checkpoints", theirs.checkpoint)
        step, restored = restore_parameters(task, checkpoints, theirs.evaluation, mesh)
    except ValueError as error:
        raise ConfigError(f"config.init_from = {source!r}: {error}") from error
    new, old = (traverse_util.flatten_dict(tree, sep="/") for tree in (params, restored))
    common = new.keys() & old.keys()
    if not common:
        raise ConfigError(
            f"config.init_from = {source!r}: it has {_parts(old)}, and this model has {_parts(new)}: they have nothing "
            "in common; name a run with the same config.model.architecture"
        )
    _check_shapes(source, {key: (new[key].shape, old[key].shape) for key in sorted(common)})
    workdirs.check_same_model(source, theirs, config)
    log.info("initialized from %s, step %d: %s", source, step, _parts({key: old[key] for key in common}))
    log.info("  new, not in that run: %s", _parts({key: new[key] for key in new.keys() - common}))
    log.info("  left out, not in this model: %s", _parts({key: old[key] for key in old.keys() - common}))
    merged = {key: jax.device_put(old[key], leaf.sharding) if key in common else leaf for key, leaf in new.items()}
    return traverse_util.unflatten_dict(merged, sep="/")


def _check_shapes(source: str, shapes: Mapping[str, tuple[Any, Any]]) -> None:
    if wrong := [f"{key}: {there} there, {here} here" for key, (here, there) in shapes.items() if here != there]:
        more = [f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        raise ConfigError(
            "\n  ".join(
                [
                    f"config.init_from = {source!r} has parameters of other shapes; set config.model as in that run's "
                    "config.json:",
                    *wrong[:10],
                    *more,
                ]
            )
        )


def _parts(params: Mapping[str, Any]) -> str:
    """Return the top-level modules and their numbers of parameters, e.g. "bert (1,234)"."""
    sizes: Counter[str] = Counter()
    for key, leaf in params.items():
        sizes[key.partition("/")[0]] += leaf.size
    return ", ".join(f"{name} ({size:,})" for name, size in sorted(sizes.items())) or "nothing"
