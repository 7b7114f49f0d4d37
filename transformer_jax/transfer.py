"""Start a run from the parameters of another one, or of a Hugging Face folder
(`config.init_from`).
"""

import dataclasses
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from flax import traverse_util
from jax.sharding import Mesh

from transformer_jax import files
from transformer_jax import workdir as workdirs
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.config import fields as known_fields
from transformer_jax.data import tokenizer_files
from transformer_jax.errors import UserError
from transformer_jax.interop import huggingface
from transformer_jax.interop.layouts import Leaf, listing
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.evaluation import restore_parameters
from transformer_jax.training.freezing import Parts, part_of
from transformer_jax.training.task import Inherited, Params, Task

log = logging.getLogger(__name__)


def keys_for(source: str) -> dict[str, Any]:
    """Return the dotted keys that a config needs in order to start from a run or a
    Hugging Face folder.

    These are init_from, keys of the model, and the kind of the tokenizer. If `source`
    is gone, but the run that the command line continues started from it, they are those
    of that run. Raises ConfigError if `source` cannot be read.
    """
    source = os.path.expanduser(source)
    if not _is_there(source) and (kept := workdirs.continued_from(source)) is not None:
        log.warning(
            "%s is gone, but this run holds everything that it needs: "
            "it continues with its own keys",
            source,
        )
        known = known_fields(kept["task"], kept["model"])
        fields = {
            name: x
            for name, x in kept["model"].items()
            if "how" not in known[f"model.{name}"].metadata
        }
        data = {
            name: kept["data"][name]
            for name in tokenizer_files.KEYS
            if name in kept["data"]
        }
    elif _is_pretrained(source, "from"):
        try:
            fields = huggingface.describe(source).fields
            data = tokenizer_files.keys_of(source)
        except ValueError as error:
            raise ConfigError(f"the Hugging Face folder {source}: {error}") from error
    else:
        stored = workdirs.read(source, "from").to_dict()
        known = known_fields(stored["task"], stored["model"])
        if unknown := [
            name for name in stored["model"] if f"model.{name}" not in known
        ]:
            raise ConfigError(
                f"from={source}, config.json: config.model.{unknown[0]} is not a key: "
                "restore the file"
            )
        fields = {
            name: x
            for name, x in stored["model"].items()
            if "how" not in known[f"model.{name}"].metadata
        }
        data = {
            name: value
            for name, value in stored["data"].items()
            if f"data.{name}" in known
            and "makes_tokens" in known[f"data.{name}"].metadata
        }
    keys = {f"model.{name}": value for name, value in fields.items()}
    return {
        "init_from": source,
        **keys,
        **{f"data.{name}": value for name, value in data.items()},
    }


def _is_there(source: str) -> bool:
    return files.exists(epath.Path(source) / "config.json")


def _is_pretrained(source: str, option: str) -> bool:
    """Return True for a Hugging Face folder, and False for the workdir of a run.

    `option` names it in messages.

    Raises ConfigError if it is neither.
    """
    path = workdirs.place(source, option) / "config.json"
    try:
        config = files.read_object(path)
        pretrained = tokenizer_files.is_pretrained(config)
        if not pretrained and "task" not in config:
            raise UserError(f"{path} has neither a task nor a model_type")
    except UserError as error:
        raise ConfigError(
            f"{option}={source}: {error}; "
            "name the workdir of a run, or a Hugging Face folder, "
            "which has config.json, model.safetensors and a tokenizer"
        ) from error
    return pretrained


class Source(NamedTuple):
    """Parameters that a run starts from.

    name, what: the value of config.init_from, and what was found there, e.g. "step 2".
    params: parameters by path, e.g. "bert/encoder/…". They have a shape and a size, and
        slices of them are arrays.
    place: puts one of them on devices, given its sharding here.
    tokenizers: hashes of its tokenizers by name.
    outputs: module → the meaning of each of its outputs, as in `Inherited`. Other
        modules are taken as they are.
    """

    name: str
    what: str
    params: Mapping[str, Any]
    place: Callable[[Any, jax.sharding.Sharding], jax.Array]
    tokenizers: Mapping[str, str]
    outputs: Mapping[str, tuple[str, ...]]


def source_of(task: Task, mesh: Mesh) -> Source:
    """Open the run or the Hugging Face folder `config.init_from`.

    The checkpoint of a run is the one that its evaluation.checkpoint selects.

    Raises ValueError if it cannot be loaded, or has a model with other keys.
    """
    if _is_pretrained(task.config.init_from, "config.init_from"):
        return _of_folder(task)
    return _of_run(task, mesh)


def merge(task: Task, source: Source, fresh: Params, *, as_is: bool = False) -> Params:
    """Return the parameters of `source` where they are those of the task, and those of
    `fresh` elsewhere.

    Parameters correspond if they have the same path. `config.inherited` names a module
    whose paths lack its name if the source has it alone: "gpt/decoder/…" is then
    "decoder/…" there. The outputs of a head are taken by their names, in any order; if
    the names differ, the head is new. With `as_is`, it is taken whatever its names.
    Logs what was loaded, what is new and what was left out.

    Raises ValueError if the source has another tokenizer, no parameter in common with
    this model, or one of another shape.
    """
    inherited = task.config.inherited
    module = inherited.module
    old = dict(source.params)
    alone = bool(module) and not any(key.startswith(f"{module}/") for key in old)
    if alone:
        old = {f"{module}/{key}": leaf for key, leaf in old.items()}
    new = traverse_util.flatten_dict(fresh, sep="/")
    _check_tokenizers(source.name, source.tokenizers, task.fingerprint(training=False))
    orders = {} if as_is else _orders(source, inherited)
    anew = tuple(f"{name}/" for name, order in orders.items() if order is None)
    common = {key for key in old.keys() & new.keys() if not key.startswith(anew)}
    taken = _taken(common, inherited, alone)
    _check_shapes(source.name, old, new, taken)
    sizes = {key: math.prod(_extent(old[key], count)) for key, count in taken.items()}
    log.info("initialized from %s, %s: %s", source.name, source.what, _parts(sizes))
    if inherited.parts:
        log.info("  taken: only %s", _named(inherited.parts))
    for key, rows in inherited.rows.items() if alone else ():
        if key in taken:
            log.info("  new: %d of %s rows of %s", len(rows), f"{rows.stop:,}", key)
    log.info("  new, not there: %s", _parts(_others(new, sizes, anew)))
    log.info("  left out, not in this model: %s", _parts(_others(old, sizes, anew)))
    merged = dict(new)
    for key, count in taken.items():
        merged[key] = _merged(source, old[key], new[key], count)
        if order := orders.get(key.partition("/")[0]):
            merged[key] = _reordered(merged[key], order)
    return traverse_util.unflatten_dict(merged, sep="/")


def _of_run(task: Task, mesh: Mesh) -> Source:
    """Return the parameters of another run."""
    name = task.config.init_from
    stored = workdirs.read(name, "config.init_from")
    try:
        theirs = parse(stored)
    except ConfigError as error:
        raise ConfigError(
            f"config.init_from = {name!r}, config.json: {error}"
        ) from error
    workdirs.check_same_model(name, theirs.model, task.config)
    _check_tokenizer_keys(name, theirs.data, task.config.data)
    other = make_task(theirs, epath.Path(name))
    checkpoints = Checkpoints(
        epath.Path(name) / "checkpoints", theirs.checkpoint, other.metrics
    )
    try:
        step, restored = restore_parameters(other, checkpoints, theirs.evaluation, mesh)
    except ValueError as error:
        raise ConfigError(f"config.init_from = {name!r}: {error}") from error
    params = traverse_util.flatten_dict(restored, sep="/")
    others = [
        key
        for key in workdirs.differing_outputs(theirs, task.config)
        if key.partition(".")[0] != "data"
    ]
    outputs = dict(theirs.inherited.outputs)
    if others:
        outputs |= dict.fromkeys(
            task.config.inherited.outputs, (f"others by {', '.join(others)}",)
        )
    return Source(
        name,
        f"step {step}",
        params,
        jax.device_put,
        other.fingerprint(training=False),
        outputs,
    )


def _of_folder(task: Task) -> Source:
    """Return the parameters in a Hugging Face folder.

    Its tokenizer is always the one that the task copies.
    """
    name = task.config.init_from
    data = task.config.data
    _check_tokenizer_keys(name, data, data)
    try:
        found = huggingface.read(name, task.config.model)
    except ValueError as error:
        raise ConfigError(f"config.init_from = {name!r}: {error}") from error
    workdirs.check_same_model(name, found.model, task.config)
    outputs = (
        dict.fromkeys(task.config.inherited.outputs, found.outputs.present)
        if found.outputs.names
        else {}
    )
    return Source(
        name, found.architecture.name, found.parameters, Leaf.place, {}, outputs
    )


def _orders(source: Source, inherited: Inherited) -> dict[str, tuple[int, ...] | None]:
    """Return the place in the source of each output of a module, or None if the source
    has other outputs.

    Modules with the same outputs in the same order are left out, and the others are
    logged.
    """
    orders: dict[str, tuple[int, ...] | None] = {}
    for module in source.outputs.keys() & inherited.outputs.keys():
        theirs = source.outputs[module]
        ours = inherited.outputs[module]
        if theirs == ours:
            continue
        same = sorted(theirs) == sorted(ours)
        orders[module] = tuple(map(theirs.index, ours)) if same else None
        what = (
            "taken in another order" if same else "new, because its outputs are others"
        )
        log.info(
            "  %s is %s: %s there, %s here",
            module,
            what,
            ", ".join(theirs),
            ", ".join(ours),
        )
    return orders


def _reordered(leaf: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Return the entries `order` of the last axis."""
    return jax.jit(lambda x: x[..., jnp.array(order)], out_shardings=leaf.sharding)(
        leaf
    )


def _taken(
    common: Set[str], inherited: Inherited, alone: bool
) -> dict[str, int | None]:
    """Return the parameters to take from the other run → None: all of it; k: the
    first k entries of its first axis.
    """
    taken = {}
    for key in common:
        for count in part_of(key, inherited.parts) if inherited.parts else (None,):
            taken[key] = (
                inherited.rows[key].start if alone and key in inherited.rows else count
            )
    return taken


def _extent(leaf: Any, count: int | None) -> tuple[int, ...]:
    """Return the shape of the first `count` entries."""
    return leaf.shape if count is None else (min(count, leaf.shape[0]), *leaf.shape[1:])


def _merged(source: Source, old: Any, new: jax.Array, count: int | None) -> jax.Array:
    """Return `old`, or the first `count` entries of `old` and the further ones of
    `new`, where `new` is.
    """
    if count is None:
        return source.place(old, new.sharding)
    first = old[:count]
    return jax.jit(
        lambda first, new: jnp.concatenate([first, new[count:]]),
        out_shardings=new.sharding,
    )(first, new)


def _check_tokenizer_keys(source: str, theirs: Any, ours: Any) -> None:
    """Raise ConfigError if the data sections ask for different tokenizers.

    That of the other run is copied.
    """
    known = {field.name: field.metadata for field in dataclasses.fields(ours)}
    wrong = [
        f"config.data.{name}: "
        f"{getattr(theirs, name, None)!r} there, {getattr(ours, name)!r} here"
        for name, metadata in known.items()
        if metadata.get("makes_tokens")
        and getattr(theirs, name, None) != getattr(ours, name)
    ]
    wrong += [
        f"config.data.{name} = {getattr(ours, name)!r}: must be empty"
        for name, metadata in known.items()
        if "makes_tokenizer" in metadata and getattr(ours, name)
    ]
    if wrong:
        raise ConfigError(
            "\n  ".join(
                [
                    (
                        f"config.init_from = {source!r}: "
                        "its tokenizer is used; set these keys accordingly:"
                    ),
                    *wrong,
                ]
            )
        )


def _check_tokenizers(
    source: str, old: Mapping[str, str], new: Mapping[str, str]
) -> None:
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise ConfigError(
                f"config.init_from = {source!r}: {name}: "
                f"sha256 {old[name][:12]}… there, {new[name][:12]}… here: "
                "the parameters belong to other tokens; "
                "let the task copy them, by data.corpus.Corpus(…, start=init_from)"
            )


def _check_shapes(
    source: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    taken: Mapping[str, int | None],
) -> None:
    if not taken:
        there, here = (
            _parts({key: leaf.size for key, leaf in params.items()})
            for params in (old, new)
        )
        raise ConfigError(
            f"config.init_from = {source!r}: it has {there}, "
            f"and this model has {here}: they have nothing in common; name another run"
        )
    if wrong := [
        key
        for key, count in sorted(taken.items())
        if _extent(old[key], count) != _extent(new[key], count)
    ]:
        what = (
            f"config.init_from = {source!r} has parameters of other shapes; "
            "name a run with the same outputs, or the one that it was started from:"
        )
        raise ConfigError(
            listing(
                what,
                [
                    f"{key}: {old[key].shape} there, {new[key].shape} here"
                    for key in wrong
                ],
            )
        )


def _others(
    params: Mapping[str, Any], sizes: Mapping[str, int], anew: tuple[str, ...]
) -> dict[str, int]:
    """Return the number of values of each parameter beyond those in `sizes`, except
    for paths that begin as `anew`.
    """
    return {
        key: more
        for key, leaf in params.items()
        if (more := leaf.size - sizes.get(key, 0)) and not key.startswith(anew)
    }


def _parts(sizes: Mapping[str, int]) -> str:
    """Return the top-level modules of parameters and their numbers of values, e.g.
    "bert (1,234)".
    """
    totals: Counter[str] = Counter()
    for key, size in sizes.items():
        totals[key.partition("/")[0]] += size
    return (
        ", ".join(f"{name} ({size:,})" for name, size in sorted(totals.items()))
        or "nothing"
    )


def _named(parts: Parts) -> str:
    return ", ".join(
        path if count is None else f"the first {count} of {path}"
        for path, count in parts.items()
    )
