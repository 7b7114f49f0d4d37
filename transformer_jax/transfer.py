"""Start a run from the parameters of another one, or of a Hugging Face folder
(`config.init_from`), or with rows of its embeddings from files.
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
import numpy as np
from etils import epath
from flax import traverse_util
from jax.sharding import Mesh

from transformer_jax import files
from transformer_jax import workdir as workdirs
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.config import fields as known_fields
from transformer_jax.data import pair_frames, tokenizer_files
from transformer_jax.errors import UserError
from transformer_jax.interop import huggingface
from transformer_jax.interop.layouts import Leaf, listing
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.evaluation import restore_parameters
from transformer_jax.training.freezing import Parts, part_with
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
    continued = None if _exists(source) else workdirs.continued_from(source)
    if continued is not None:
        log.warning(
            "%s is gone, but this run holds everything that it needs: "
            "it continues with its own keys",
            source,
        )
        keys = _keys_of_continued_run(continued)
    elif _is_pretrained(source, "from"):
        keys = _keys_of_folder(source)
    else:
        keys = _keys_of_run(source)
    return {"init_from": source, **keys}


def _keys_of_continued_run(config: dict[str, Any]) -> dict[str, Any]:
    data = {
        name: value
        for name, value in config["data"].items()
        if name in tokenizer_files.KEYS
    }
    return _model_keys(config) | _dotted("data", data)


def _keys_of_folder(source: str) -> dict[str, Any]:
    try:
        architecture, _, model, described = huggingface.describe(source)
        data = tokenizer_files.keys_of(source)
        if architecture.framed:
            data |= pair_frames.frames_of(source, described)
    except ValueError as error:
        raise ConfigError(f"the Hugging Face folder {source}: {error}") from error
    return _dotted("model", model) | _dotted("data", data)


def _keys_of_run(source: str) -> dict[str, Any]:
    config = workdirs.read(source, "from").to_dict()
    fields = known_fields(config["task"], config["model"])
    unknown = [name for name in config["model"] if f"model.{name}" not in fields]
    if unknown:
        raise ConfigError(
            f"from={source}, config.json: config.model.{unknown[0]} is not a key: "
            "restore the file"
        )
    data = {
        key: value
        for key, value in _dotted("data", config["data"]).items()
        if key in fields and "makes_tokens" in fields[key].metadata
    }
    return _model_keys(config) | data


def _model_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a config that define its model, and not only how it is
    computed.
    """
    fields = known_fields(config["task"], config["model"])
    return {
        key: value
        for key, value in _dotted("model", config["model"]).items()
        if "how" not in fields[key].metadata
    }


def _dotted(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in values.items()}


def _exists(source: str) -> bool:
    return files.exists(epath.Path(source) / "config.json")


def _is_pretrained(source: str, option: str) -> bool:
    """Return True for a Hugging Face folder, and False for the workdir of a run.

    `option` names it in messages.

    Raises ConfigError if it is neither.
    """
    path = workdirs.path_of(source, option) / "config.json"
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

    name: the value of config.init_from.
    origin: the part of it that has the parameters, e.g. "step 2".
    params: parameters by path, e.g. "bert/encoder/…". They have a shape and a size, and
        slices of them are arrays.
    place: puts one of them on devices, given its sharding in this run.
    tokenizers: hashes of its tokenizers by name.
    outputs: module → the meaning of each of its outputs, as in `Inherited`. Other
        modules are taken as they are.
    """

    name: str
    origin: str
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
    that the source may have trained alone: "decoder/…" there is then "gpt/decoder/…"
    here. The outputs of a head are taken by their names, in any order; if the names
    differ, the head is new. With `as_is`, it is taken whatever its names. Logs what was
    loaded, what is new and what was left out.

    Raises ValueError if the source has another tokenizer, no parameter in common with
    this model, or one of another shape.
    """
    inherited = task.config.inherited
    ours = traverse_util.flatten_dict(fresh, sep="/")
    theirs = dict(source.params)
    new_rows: Mapping[str, range] = {}
    if _lacks_module(theirs, inherited.module):
        theirs = {f"{inherited.module}/{path}": x for path, x in theirs.items()}
        new_rows = inherited.rows

    _check_tokenizers(source.name, source.tokenizers, task.fingerprint(training=False))
    orders = {} if as_is else _orders(source, inherited)
    new_heads = tuple(f"{head}/" for head, order in orders.items() if order is None)
    common = {
        path for path in theirs.keys() & ours.keys() if not path.startswith(new_heads)
    }
    counts = _counts(common, inherited.parts, new_rows)
    _check_shapes(source.name, theirs, ours, counts)

    sizes = {
        path: math.prod(_extent(theirs[path], count)) for path, count in counts.items()
    }
    log.info("initialized from %s, %s: %s", source.name, source.origin, _totals(sizes))
    if inherited.parts:
        log.info("  taken: only %s", _named(inherited.parts))
    for path, rows in new_rows.items():
        if path in counts:
            log.info("  new: %d of %s rows of %s", len(rows), f"{rows.stop:,}", path)
    fresh_sizes = _remaining(ours, sizes, new_heads)
    unused_sizes = _remaining(theirs, sizes, new_heads)
    log.info("  new, not there: %s", _totals(fresh_sizes))
    log.info("  left out, not in this model: %s", _totals(unused_sizes))
    if not as_is:
        _check_new_is_trained(task, fresh_sizes)

    merged = dict(ours)
    for path, count in counts.items():
        value = _loaded(source, theirs[path], ours[path], count)
        head, _, _ = path.partition("/")
        order = orders.get(head)
        merged[path] = _reordered(value, order) if order else value
    return traverse_util.unflatten_dict(merged, sep="/")


def check_files(task: Task) -> None:
    """Raise ValueError if a file with rows of the parameters is unusable, as far as its
    beginning shows.
    """
    for table in task.config.given_tables:
        table.check()


def with_files(task: Task, params: Params) -> Params:
    """Return the parameters with the rows that the config takes from files, e.g. word
    vectors.

    Raises ValueError if a file is invalid, or the model has no such table.
    """
    corpus: Any = task.corpus
    ours = traverse_util.flatten_dict(params, sep="/")
    for given in task.config.given_tables:
        if given.path not in ours:
            raise ConfigError(
                f"the model has no embedding {given.path} for the {given.stream}: "
                "leave out the file of its vectors"
            )
        tokenizer = corpus.tokenizers[given.stream]
        rows, used = given.rows(tokenizer.tokens(range(tokenizer.size)))
        ours[given.path] = _with_rows(ours[given.path], rows, used)
    return traverse_util.unflatten_dict(ours, sep="/")


def _with_rows(ours: jax.Array, rows: np.ndarray, used: np.ndarray) -> jax.Array:
    """Return a table (V, D) with the first rows (n, D), where `used` (n,) is True."""

    def join(ours: jax.Array, rows: jax.Array, used: jax.Array) -> jax.Array:
        count = len(rows)
        first = jnp.where(used[:, None], rows, ours[:count])
        return jnp.concatenate([first, ours[count:]])

    return jax.jit(join, out_shardings=ours.sharding)(ours, rows, used)


def _lacks_module(params: Mapping[str, Any], module: str) -> bool:
    """Return True if no parameter is in `module`, the name of a module or ""."""
    return bool(module) and not any(path.startswith(f"{module}/") for path in params)


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
    differing_keys = [
        key
        for key in workdirs.differing_outputs(theirs, task.config)
        if not key.startswith("data.")
    ]
    outputs = dict(theirs.inherited.outputs)
    if differing_keys:
        other_outputs = (f"others by {', '.join(differing_keys)}",)
        outputs |= dict.fromkeys(task.config.inherited.outputs, other_outputs)
    tokenizers = other.fingerprint(training=False)
    return Source(name, f"step {step}", params, jax.device_put, tokenizers, outputs)


def _of_folder(task: Task) -> Source:
    """Return the parameters in a Hugging Face folder.

    Its tokenizer is always the one that the task copies.
    """
    name = task.config.init_from
    data = task.config.data
    _check_tokenizer_keys(name, data, data)
    try:
        pretrained = huggingface.read(name, task.config.model)
    except ValueError as error:
        raise ConfigError(f"config.init_from = {name!r}: {error}") from error
    workdirs.check_same_model(name, pretrained.model, task.config)
    outputs: dict[str, tuple[str, ...]] = {}
    if pretrained.outputs.names:
        outputs = dict.fromkeys(
            task.config.inherited.outputs, pretrained.outputs.present
        )
    if pretrained.architecture.framed:
        _warn_of_frames(name, data)
    architecture = pretrained.architecture.name
    return Source(name, architecture, pretrained.parameters, Leaf.place, {}, outputs)


def _warn_of_frames(folder: str, data: Any) -> None:
    """Log the tokens around texts that a model knows and this run does not have."""
    theirs = pair_frames.frames_of(folder, huggingface.read_config(folder))
    for key, frame in theirs.items():
        if frame and not getattr(data, key, ()):
            log.warning(
                "%s was trained with data.%s = %s, and here, no such tokens are around "
                "texts: set the key if this task has it",
                folder,
                key,
                frame,
            )


def _orders(source: Source, inherited: Inherited) -> dict[str, tuple[int, ...] | None]:
    """Return the index in the source of each output of a module, or None if the source
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
        if sorted(theirs) == sorted(ours):
            orders[module] = tuple(map(theirs.index, ours))
            state = "taken in another order"
        else:
            orders[module] = None
            state = "new, because its outputs are others"
        log.info(
            "  %s is %s: %s there, %s here",
            module,
            state,
            ", ".join(theirs),
            ", ".join(ours),
        )
    return orders


def _counts(
    paths: Set[str], parts: Parts, new_rows: Mapping[str, range]
) -> dict[str, int | None]:
    """Return the parameters to take from the source, with the number of entries of the
    first axis that are taken. None: all of them.

    They are those `paths` that are in `parts`, or all if there are no parts. `new_rows`
    are rows that the source does not have, see `Inherited`.
    """
    counts: dict[str, int | None] = {}
    for path in paths:
        part = part_with(path, parts)
        if parts and part is None:
            continue
        if path in new_rows:
            counts[path] = new_rows[path].start
        else:
            counts[path] = None if part is None else parts[part]
    return counts


def _extent(value: Any, count: int | None) -> tuple[int, ...]:
    """Return the shape of the first `count` entries."""
    if count is None:
        return value.shape
    length, *trailing = value.shape
    return min(count, length), *trailing


def _loaded(
    source: Source, theirs: Any, ours: jax.Array, count: int | None
) -> jax.Array:
    """Return `theirs`, or the first `count` entries of `theirs` and the further ones of
    `ours`, on the devices of `ours`.
    """
    if count is None:
        return source.place(theirs, ours.sharding)
    join = jax.jit(
        lambda first, ours: jnp.concatenate([first, ours[count:]]),
        out_shardings=ours.sharding,
    )
    return join(theirs[:count], ours)


def _reordered(value: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Return the entries `order` of the last axis."""
    pick = jax.jit(lambda x: x[..., jnp.array(order)], out_shardings=value.sharding)
    return pick(value)


def _check_tokenizer_keys(source: str, theirs: Any, ours: Any) -> None:
    """Raise ConfigError if the data sections ask for different tokenizers.

    That of the other run is copied.
    """
    wrong = []
    unwanted = []
    for field in dataclasses.fields(ours):
        key = f"config.data.{field.name}"
        our_value = getattr(ours, field.name)
        their_value = getattr(theirs, field.name, None)
        if field.metadata.get("makes_tokens") and their_value != our_value:
            wrong.append(f"{key}: {their_value!r} there, {our_value!r} here")
        if "makes_tokenizer" in field.metadata and our_value:
            unwanted.append(f"{key} = {our_value!r}: must be empty")
    if wrong or unwanted:
        title = (
            f"config.init_from = {source!r}: "
            "its tokenizer is used; set these keys accordingly:"
        )
        raise ConfigError("\n  ".join([title, *wrong, *unwanted]))


def _check_tokenizers(
    source: str, theirs: Mapping[str, str], ours: Mapping[str, str]
) -> None:
    for name in sorted(theirs.keys() & ours.keys()):
        if theirs[name] != ours[name]:
            raise ConfigError(
                f"config.init_from = {source!r}: {name}: "
                f"sha256 {theirs[name][:12]}… there, {ours[name][:12]}… here: "
                "the parameters belong to other tokens; "
                "let the task copy them, by data.corpus.Corpus(…, start=init_from)"
            )


def _check_shapes(
    source: str,
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    counts: Mapping[str, int | None],
) -> None:
    if not counts:
        their_totals = _totals({path: x.size for path, x in theirs.items()})
        our_totals = _totals({path: x.size for path, x in ours.items()})
        raise ConfigError(
            f"config.init_from = {source!r}: it has {their_totals}, and this model "
            f"has {our_totals}: they have nothing in common; name another run"
        )
    wrong = [
        f"{path}: {theirs[path].shape} there, {ours[path].shape} here"
        for path, count in sorted(counts.items())
        if _extent(theirs[path], count) != _extent(ours[path], count)
    ]
    if wrong:
        title = (
            f"config.init_from = {source!r} has parameters of other shapes; "
            "name a run with the same outputs, or the one that it was started from:"
        )
        raise ConfigError(listing(title, wrong))


def _check_new_is_trained(task: Task, fresh: Mapping[str, int]) -> None:
    """Raise ConfigError if LoRA would keep the random values of a new parameter."""
    config = task.config
    if not config.lora.rank:
        return
    lost = [path for path in fresh if part_with(path, config.whole_parts) is None]
    if lost:
        modules = sorted({path.rpartition("/")[0] for path in lost})
        title = (
            f"config.init_from = {config.init_from!r} lacks parameters that LoRA would "
            "keep at random values: add their modules to lora.fully_trained"
        )
        raise ConfigError(listing(title, modules))


def _remaining(
    params: Mapping[str, Any], taken: Mapping[str, int], new_heads: tuple[str, ...]
) -> dict[str, int]:
    """Return the number of values of each parameter beyond those in `taken`.

    Parameters without such values, and those of `new_heads`, are left out.
    """
    sizes = {
        path: value.size - taken.get(path, 0)
        for path, value in params.items()
        if not path.startswith(new_heads)
    }
    return {path: size for path, size in sizes.items() if size}


def _totals(sizes: Mapping[str, int]) -> str:
    """Return the top-level modules of parameters and their numbers of values, e.g.
    "bert (1,234)".
    """
    totals: Counter[str] = Counter()
    for path, size in sizes.items():
        module, _, _ = path.partition("/")
        totals[module] += size
    parts = [f"{module} ({size:,})" for module, size in sorted(totals.items())]
    return ", ".join(parts) or "nothing"


def _named(parts: Parts) -> str:
    return ", ".join(
        path if count is None else f"the first {count} of {path}"
        for path, count in parts.items()
    )
