"""Read and write models of Hugging Face's transformers: safetensors and config.json.

`read` maps the file into memory and reads parameters only where they are placed. The
tables of `interop.bert` and its neighbours say where each parameter is.
`tokenizer_files` reads and writes the tokenizers of such folders.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from transformer_jax import files
from transformer_jax.data import pair_frames, tokenizer_files
from transformer_jax.interop import (
    bart,
    bert,
    distilbert,
    electra,
    generation,
    gpt,
    keys,
    layouts,
    marian,
    roberta,
    t5,
    tensors,
)
from transformer_jax.interop.architecture import NOTHING, Architecture, Outputs
from transformer_jax.interop.layouts import Leaf, Slot
from transformer_jax.interop.tensors import InteropError, Tensors

log = logging.getLogger(__name__)

ARCHITECTURES: tuple[Architecture, ...] = (
    *bert.ARCHITECTURES,
    *roberta.ARCHITECTURES,
    *distilbert.ARCHITECTURES,
    *electra.ARCHITECTURES,
    *gpt.ARCHITECTURES,
    *marian.ARCHITECTURES,
    *t5.ARCHITECTURES,
    *bart.ARCHITECTURES,
)


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model of transformers in a folder.

    Attributes:
        folder: the folder.
        architecture: its class, and our task for it.
        model: our model config.
        outputs: the outputs of its head, with the settings that they need in our
            config.
        table: the place of each of our parameters.
        parameters: path → parameter, read when it is needed. What the file lacks is
            missing here too.
    """

    folder: str
    architecture: Architecture
    model: Any
    outputs: Outputs
    table: Sequence[Slot]
    parameters: Mapping[str, Leaf]

    @property
    def module(self) -> nn.Module:
        """Our Flax module."""
        return self.architecture.module(self.model, self.outputs.size)

    def params(self, sharding: jax.sharding.Sharding | None = None) -> Any:
        """Return the parameters as a tree for `module`, all with the same sharding
        (default: on the first device).

        What the file lacks, e.g. the pooler of a masked language model, is zero.
        """
        sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        zeros = {
            slot.path: jnp.zeros(slot.shape, device=sharding)
            for slot in self.table
            if slot.path not in self.parameters
        }
        placed = {path: leaf.place(sharding) for path, leaf in self.parameters.items()}
        return traverse_util.unflatten_dict(zeros | placed, sep="/")

    def tokenize(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (B, T) of texts, padded to the longest, and where they are
        valid (B, T): True at tokens, False at padding.

        The special ids around a text are those of transformers. An encoder–decoder
        reads the texts as sources.

        Raises the errors of `tokenizer_files.from_folder`.
        """
        file, *_ = tokenizer_files.names_of(self.folder)
        tokenizer = tokenizer_files.from_folder(self.folder, file)
        begin, end = self.architecture.around
        if self.architecture.begins:
            begin = tokenizer_files.begins(self.folder)
        before = tokenizer.bos_id if begin else None
        rows = tokenizer.encode(texts, before, tokenizer.eos_id if end else None)
        if self.architecture.framed:
            frames = pair_frames.frames_of(self.folder, read_config(self.folder))
            rows = rows.framed(*map(tokenizer.id_of, frames["source_frame"]))
        valid = np.arange(rows.lengths.max(initial=0)) < rows.lengths[:, None]
        tokens = np.full(valid.shape, tokenizer.pad_id or 0, np.int32)
        tokens[valid] = rows.values
        return tokens, valid

    def write(self, folder: os.PathLike | str, params: Any) -> None:
        """Write a model with other parameters, e.g. trained ones, to a new folder, with
        the tokenizer of this one.

        Raises the errors of `huggingface.write` and of `tokenizer_files.from_folder`.
        """
        *_, file = tokenizer_files.names_of(self.folder)
        tokenizer = tokenizer_files.from_folder(self.folder, file)
        paths = [Path(self.folder) / name for name in tokenizer_files.FILES]
        copies = {path.name: path.read_bytes() for path in paths if files.exists(path)}
        write(
            folder,
            self.architecture.task,
            self.model,
            params,
            self.outputs.settings,
            self.architecture.name,
            {name: getattr(tokenizer, name) for name in ("pad_id", "bos_id", "eos_id")},
            lambda _: copies,
        )


class Description(NamedTuple):
    """A model as its config.json describes it.

    Attributes:
        architecture: its class, and our task for it.
        outputs: the outputs of its head.
        fields: fields of our model config.
        config: the content of config.json, and of generation_config.json if there is
            one.
    """

    architecture: Architecture
    outputs: Outputs
    fields: dict[str, Any]
    config: dict[str, Any]


def read(folder: os.PathLike | str, like: Any = None) -> Pretrained:
    """Read a model from a folder.

    Args:
        folder: a local folder with config.json and model.safetensors, or shards and
            their index.
        like: our model config with the values of fields that config.json does not
            determine, e.g. vocab_multiple. None, or a config of another class: they
            have their defaults.

    Raises:
        InteropError: a file is missing or damaged, or the model is not supported.
    """
    architecture, outputs, fields, config = describe(folder)
    kind = architecture.config.model
    undetermined = vars(like) if isinstance(like, kind) else {}
    try:
        model = kind(**undetermined | fields)
        model.check()
    except ValueError as error:
        raise InteropError(f"{folder}: {error}") from error
    tensors = Tensors(folder)
    table = slots(architecture, model, outputs)
    names = architecture.names(list(tensors))
    lacks = architecture.lacks + architecture.optional
    leaves = layouts.read(
        table,
        tensors,
        names,
        lacks,
        architecture.unused,
        architecture.ties,
        architecture.copies,
    )
    _warn(os.fspath(folder), architecture, config)
    return Pretrained(os.fspath(folder), architecture, model, outputs, table, leaves)


def describe(folder: os.PathLike | str) -> Description:
    """Read config.json.

    Raises InteropError if config.json cannot be read, or describes a model that is not
    supported.
    """
    config = read_config(folder)
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else listed
    named = [
        architecture for architecture in ARCHITECTURES if architecture.name == name
    ]
    if not named:
        choices = dict.fromkeys(architecture.name for architecture in ARCHITECTURES)
        raise InteropError(
            f"{folder}/config.json: architectures = {listed!r} is not supported: "
            f"the first must be one of {', '.join(choices)}"
        )
    # keys that a folder lacks have other defaults in another type
    if (kind := config.get("model_type")) != named[0].model_type:
        raise InteropError(
            f"{folder}/config.json: model_type = {kind!r} is not supported with "
            f"architectures = {listed!r}, only {named[0].model_type!r}"
        )
    try:
        keys.refuse(config, named[0].config.supported)
        fields = named[0].config.read(config)
        heads = [architecture.head.read(config) for architecture in named]
    except ValueError as error:
        raise InteropError(f"{folder}: {error}") from error
    for architecture, outputs in zip(named, heads, strict=True):
        if outputs:
            return Description(architecture, outputs, fields, config)
    raise InteropError(
        f"{folder}/config.json: {name} with problem_type = "
        f"{config.get('problem_type')!r} and {len(config.get('id2label') or ())} "
        "labels is not supported, only one label of several, or one number"
    )


def read_config(folder: os.PathLike | str) -> dict[str, Any]:
    """Return the content of config.json, and of generation_config.json if there is one.

    Raises InteropError if it cannot be read.
    """
    if "://" in os.fspath(folder):
        raise InteropError(
            f"{folder}: tensors are mapped from local files; "
            "copy the folder to this machine"
        )
    config = files.read_object(Path(folder) / "config.json", InteropError)
    other = Path(folder) / "generation_config.json"
    if not files.exists(other):
        return config
    # Like transformers, which then ignores what an older config.json says about
    # `generate`.
    return {
        key: value for key, value in config.items() if key not in generation.NEUTRAL
    } | files.read_object(other, InteropError)


def _warn(folder: str, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Log the keys that are not read although they may have an effect."""
    if architecture.generates and (
        ignored := list(generation.ignored(config, set(architecture.generates)))
    ):
        log.warning(
            "%s: these settings of `generate` are not taken over: "
            "%s; config.decoding has the keys that exist here",
            folder,
            ", ".join(ignored),
        )
    supported = architecture.config.supported | set(architecture.more)
    if unknown := list(keys.unknown(config, supported)):
        log.warning(
            "%s: config.json has keys that are unknown here, and have no effect: "
            "%s; compare predictions with those of the original if they may matter",
            folder,
            ", ".join(unknown),
        )


def write(
    folder: os.PathLike | str,
    task: str,
    model: Any,
    params: Any,
    settings: Mapping[str, Any],
    name: str = "",
    special_ids: Mapping[str, int | None] = NOTHING,
    beside: Callable[[Architecture], Mapping[str, bytes]] = lambda architecture: {},
) -> Architecture:
    """Write a model to a new folder: model.safetensors, config.json and, if it
    generates text, generation_config.json.

    Return the class that was written. Nothing is written if the model or the tokenizer
    cannot be. config.json is the last file: a folder without it can be written again.

    Args:
        folder: a folder without a config.json. It is created if it does not exist.
        task: our task, e.g. "classification".
        model: our model config.
        params: the tree of our parameters.
        settings: all keys of our config by dotted name, e.g. "data.labels".
        name: the class of transformers to write. "": the first that fits.
        special_ids: "pad_id", "bos_id" and "eos_id" → id, or None if the tokenizer has
            none.
        beside: the class that is written → the contents of further files by name, e.g.
            those of the tokenizer.

    Raises:
        InteropError: the folder holds another model, or is not local, or transformers
            has no such model.
        OutputError: a file cannot be written.
    """
    if "://" in os.fspath(folder):
        raise InteropError(
            f"{folder}: models are written to local folders; name one, and copy it"
        )
    folder = Path(folder)
    with files.explained(f"{folder} cannot be used", "name another folder"):
        taken = files.exists(folder / "config.json")
    if taken:
        raise InteropError(f"{folder} already has a config.json: name another folder")
    architecture, keys, table = counterpart(task, model, settings, name)
    left_out = tuple(f"{module}/" for module in architecture.lacks)
    flat = {
        path: leaf
        for path, leaf in traverse_util.flatten_dict(params, sep="/").items()
        if not path.startswith(left_out)
    }
    layouts.check(table, {path: leaf.shape for path, leaf in flat.items()})
    start = architecture.prefix if architecture.bare else ""
    written = (
        (name.removeprefix(start), shape, make)
        for name, shape, make in layouts.tensors_of(table, flat)
    )
    config = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "dtype": "float32",
        **keys,
        **architecture.more,
        **architecture.special_ids(special_ids),
    }
    generation = architecture.head.generation(settings, special_ids)
    objects = {"generation_config.json": generation} if generation else {}
    objects["config.json"] = config
    texts = {
        name: json.dumps(content, indent=2) + "\n" for name, content in objects.items()
    }
    more = {
        **beside(architecture),
        **{name: text.encode() for name, text in texts.items()},
    }
    files.make_folder(folder)
    tensors.write(folder / tensors.FILE, written)
    files.write_all(folder, more)
    return architecture


def counterpart(
    task: str, model: Any, settings: Mapping[str, Any], name: str = ""
) -> tuple[Architecture, dict[str, Any], list[Slot]]:
    """Return the class of transformers that a model of ours can be written as, its keys
    of config.json, and the place of each of our parameters.

    For the arguments, see `write`. Raises InteropError if there is none.
    """
    architecture, keys = _suitable(task, model, settings, name)
    outputs = architecture.head.read(keys)
    if outputs is None:
        raise InteropError(f"{architecture.name} cannot be written with {keys}")
    return architecture, keys, slots(architecture, model, outputs)


def _suitable(
    task: str, model: Any, settings: Mapping[str, Any], name: str
) -> tuple[Architecture, dict[str, Any]]:
    """Return the first architecture that a model of ours can be written as, and its
    keys of config.json.
    """
    reasons: dict[str, str] = {}  # model type → why it is none
    for architecture in ARCHITECTURES:
        same = architecture.task == task and type(model) is architecture.config.model
        keys = (
            architecture.head.write(settings)
            if same and name in ("", architecture.name)
            else None
        )
        if keys is not None:
            try:
                return architecture, architecture.config.write(model) | keys
            except InteropError as error:
                reasons.setdefault(architecture.model_type, str(error))
    if len(reasons) > 1:
        raise InteropError(
            "; ".join(f"not {kind}: {reason}" for kind, reason in reasons.items())
        )
    if reasons:
        raise InteropError(*reasons.values())
    tasks = dict.fromkeys(architecture.task for architecture in ARCHITECTURES)
    called = name and f" called {name}"
    raise InteropError(
        f"{task} with a {type(model).__name__} has "
        f"no counterpart in transformers{called}: "
        f"the tasks that have one are {', '.join(tasks)}"
    )


def slots(architecture: Architecture, model: Any, outputs: Outputs) -> list[Slot]:
    """Return the table of a model, with the sizes of each of our parameters."""
    module = architecture.module(model, outputs.size)
    tokens = jnp.zeros((1, 1), jnp.int32)
    boxed = jax.eval_shape(
        module.init, jax.random.key(0), *architecture.example(tokens)
    )["params"]
    shapes = traverse_util.flatten_dict(
        jax.tree.map(lambda x: x.shape, nn.unbox(boxed)), sep="/"
    )
    return layouts.resolve(architecture.table(model, outputs), shapes)
