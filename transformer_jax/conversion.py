"""Make a workdir of a Hugging Face folder, and a Hugging Face folder of a workdir;
the same with adapters of PEFT.
"""

import logging
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath
from flax import traverse_util
from ml_collections import ConfigDict

from transformer_jax import files, transfer
from transformer_jax import workdir as workdirs
from transformer_jax.config import ConfigError, defaults, make_task, parse
from transformer_jax.data import sentencepiece, tokenizer_files
from transformer_jax.data.streams import Tokens
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.interop import huggingface, peft
from transformer_jax.interop.architecture import Architecture
from transformer_jax.interop.layouts import listing
from transformer_jax.predictor import Predictor
from transformer_jax.training import lock, lora
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.evaluation import restore_trained
from transformer_jax.training.initialization import TrainState, initial_parameters
from transformer_jax.training.lora import Form, form_of
from transformer_jax.training.sharding import make_mesh
from transformer_jax.training.task import Config

log = logging.getLogger(__name__)


def config_for(folder: str, adapter: str = "") -> ConfigDict:
    """Return the config of a run whose model is in a Hugging Face folder, with LoRA if
    there is the folder of an adapter of PEFT.

    Its data.directory is yet to be named.

    Raises ValueError if the folder cannot be read, or holds a model that is not
    supported.
    """
    if not tokenizer_files.is_pretrained(huggingface.read_config(folder)):
        raise ConfigError(
            f"{folder} is not a Hugging Face folder: "
            "its config.json names no model_type; name "
            "a folder that was downloaded from Hugging Face, or written by transformers"
        )
    architecture, outputs, fields, described = huggingface.describe(folder)
    config = defaults(architecture.task, fields["architecture"])
    config.update_from_flattened_dict(
        {**transfer.keys_for(folder), **outputs.settings, "data.directory": "(none)"}
    )
    config.data.max_length = min(
        config.data.max_length, fields.get("max_length", config.data.max_length)
    )
    end = described.get("eos_token_id")
    if architecture.ends and tokenizer_files.is_other_end(folder, end):
        config.update_from_flattened_dict({architecture.ends: (end,)})
    if architecture.begins:
        config.update_from_flattened_dict(
            {architecture.begins: tokenizer_files.begins(folder)}
        )
    if adapter:
        config.lora.update(_lora_keys(config, adapter))
    return config


def _adapter(folder: str, adapter: str, model: Any = None) -> peft.Adapter:
    """Read an adapter for the model in a Hugging Face folder."""
    return peft.read(adapter, huggingface.read(folder, model))


def _lora_keys(config: ConfigDict, adapter: str) -> dict[str, Any]:
    """Return the keys of LoRA that an adapter needs."""
    read = _adapter(config.init_from, adapter)
    heads = parse(config).inherited.outputs
    paths = [path for path in read.whole if path.partition("/")[0] not in heads]
    modules = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    return {
        "rank": read.rank,
        "alpha": read.alpha,
        "targets": tuple(read.factors),
        "fully_trained": tuple(modules),
    }


def to_workdir(config: ConfigDict, workdir: epath.PathLike, adapter: str = "") -> None:
    """Write the model in the Hugging Face folder `config.init_from`, with an adapter if
    one is named, to a new workdir, as a checkpoint at step 0.

    `config` comes from `config_for`. Parameters that the folder lacks, e.g. a head that
    its class does not have, have random values; the log names them.

    Raises the errors of `config.parse` and `transfer`, and ConfigError if the
    workdir has checkpoints.
    """
    workdir = workdirs.path_of(workdir)
    task = make_task(parse(config), workdir)
    with lock.held(workdir):
        if files.exists(workdir / "checkpoints"):
            raise ConfigError(f"{workdir} has checkpoints: choose another --workdir")
        mesh = make_mesh(task.config.mesh)
        form = form_of(task.config, jax.eval_shape(task.init, jax.random.key(0)))
        values = _values(task.config, form, adapter) if adapter else {}
        source = transfer.source_of(task, mesh)
        workdirs.claim(workdir, config)
        fresh = initial_parameters(task, mesh)
        params = transfer.merge(task, source, fresh, as_is=True)
        trained, base = form.split(params, jax.random.key(0))
        trained = jax.tree_util.tree_map_with_path(
            lambda path, x: values.get(_name(path), x), trained
        )
        state = TrainState(jnp.zeros((), jnp.int32), trained, (), base=base)
        checkpoints = Checkpoints(
            workdir / "checkpoints", task.config.checkpoint, task.metrics
        )
        meta = {
            "fingerprint": task.fingerprint(training=False),
            "position": 0,
            "scored": "params",
        }
        checkpoints.save(0, state, meta)
        checkpoints.close()
    log.info("%s is a workdir with the task %s", workdir, config.task)


def _name(path: tuple) -> str:
    """Return the path of a parameter, e.g. "head/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _values(config: Config, form: Form, adapter: str) -> dict[str, jax.Array]:
    """Return the trained parameters of LoRA in an adapter, by path.

    Raises ConfigError if config.lora does not describe it.
    """
    read = _adapter(config.init_from, adapter, config.model)
    values = dict(read.whole)
    for module, (a, b) in read.factors.items():
        values |= {f"{module}/{lora.A}": a, f"{module}/{lora.B}": b}
    there = {path: value.shape for path, value in values.items()}
    here = {
        _name(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(form.trained))
    }
    wrong = [
        f"{path}: {there.get(path, 'nothing')} there, {here.get(path, 'nothing')} here"
        for path in sorted(there.keys() | here.keys())
        if there.get(path) != here.get(path)
        and (path in there or path.endswith((lora.A, lora.B)))
    ]
    if wrong or read.alpha != config.lora.alpha:
        title = (
            f"{adapter} has r = {read.rank} and α = {read.alpha:g}, and config.lora "
            "describes another adapter: leave out --config.lora.…"
        )
        raise ConfigError(listing(title, wrong))
    return {path: jnp.asarray(value) for path, value in values.items()}


def to_adapter(workdir: epath.PathLike, config: ConfigDict, folder: str) -> None:
    """Write what LoRA has trained to a new folder, as an adapter of PEFT.

    Raises ValueError if the run has no LoRA, PEFT has no such adapter, or the folder
    holds one or cannot be written.
    """
    workdir = workdirs.path_of(workdir)
    workdirs.check_model(workdir, config)
    parsed = parse(config)
    if not parsed.lora.rank:
        raise ConfigError(
            f"{workdir} was trained without LoRA: write the whole model instead, with "
            "--to_huggingface"
        )
    task = make_task(parsed, workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", parsed.checkpoint, task.metrics)
    mesh = make_mesh(parsed.mesh)
    step, trained = restore_trained(task, checkpoints, parsed.evaluation, mesh)
    flat = traverse_util.flatten_dict(trained, sep="/")
    modules = [
        path.removesuffix(f"/{lora.A}") for path in flat if path.endswith(lora.A)
    ]
    factors = {
        module: (flat.pop(f"{module}/{lora.A}"), flat.pop(f"{module}/{lora.B}"))
        for module in modules
    }
    adapter = peft.Adapter(parsed.lora.rank, parsed.lora.alpha, factors, flat)
    architecture, _, slots = huggingface.counterpart(
        config.task, parsed.model, _flat(config.to_dict())
    )
    peft.write(folder, adapter, architecture, slots, config.init_from)
    log.info(
        "%s is an adapter of PEFT for the %s in %s, of step %d",
        folder,
        architecture.name,
        config.init_from,
        step,
    )


def to_folder(workdir: epath.PathLike, config: ConfigDict, folder: str) -> None:
    """Write the model of a workdir, and its tokenizer, to a new Hugging Face folder.

    `config` is the run's config, possibly with changed values, e.g.
    evaluation.checkpoint. Raises ValueError if transformers has no such model or
    tokenizer, or if the folder has a config.json or cannot be written.
    """
    predictor = Predictor(workdir, config)
    # The last one is that of the text that is written, if there are two.
    tokenizers = [
        Tokenizer.load(path)
        for path in sorted(epath.Path(workdir).glob("tokenizer*.json"))
    ]
    streams = predictor.task.corpus.streams.values()
    texts = [stream for stream in streams if isinstance(stream, Tokens)]
    begin, end, pad = texts[-1].optional_ids
    special_ids = {"pad_id": pad, "bos_id": begin, "eos_id": end}
    settings = _flat(config.to_dict())
    model = predictor.config.model
    max_length = settings["model.max_length"]

    def beside(written: Architecture) -> Mapping[str, bytes]:
        """Return the files of the tokenizers.

        Of two, transformers may have no counterpart.
        """
        if len(tokenizers) == 1:
            begin, end = written.around
            options: Any = {
                "begin": begin or settings.get(written.begins, False),
                "end": end,
                "pad_id": written.special_ids(special_ids).get("pad_token_id"),
                "segments": written.segments,
                "frame": texts[0].frame,
            }
            return tokenizer_files.contents(
                tokenizers[0], **options, max_length=max_length
            )
        try:
            return sentencepiece.contents(tokenizers[0], tokenizers[1], max_length)
        except TokenizerError as error:
            log.warning("only the model is written, without a tokenizer: %s", error)
            return {}

    written = huggingface.write(
        folder,
        config.task,
        model,
        predictor.params,
        settings,
        special_ids=special_ids,
        beside=beside,
    )
    log.info(
        "%s is a Hugging Face folder with a %s, of step %d",
        folder,
        written.name,
        predictor.step,
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    sections = {
        section: keys for section, keys in config.items() if isinstance(keys, Mapping)
    }
    return {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
    }
