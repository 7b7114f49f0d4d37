"""Make a workdir of a Hugging Face folder, and a Hugging Face folder of a workdir."""

import logging
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from etils import epath
from ml_collections import ConfigDict

from transformer_jax import files, transfer
from transformer_jax import workdir as workdirs
from transformer_jax.config import ConfigError, defaults, make_task, parse
from transformer_jax.data import sentencepiece, tokenizer_files
from transformer_jax.data.streams import Tokens
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError
from transformer_jax.interop import huggingface
from transformer_jax.interop.architecture import Architecture
from transformer_jax.predictor import Predictor
from transformer_jax.training import lock
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.initialization import TrainState, initial_parameters
from transformer_jax.training.sharding import make_mesh

log = logging.getLogger(__name__)


def config_for(folder: str) -> ConfigDict:
    """Return the config of a run whose model is in a Hugging Face folder.

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
    return config


def to_workdir(config: ConfigDict, workdir: epath.PathLike) -> None:
    """Write the model in the Hugging Face folder `config.init_from` to a new workdir,
    as a checkpoint at step 0.

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
        source = transfer.source_of(task, mesh)
        workdirs.claim(workdir, config)
        fresh = initial_parameters(task, mesh)
        params = transfer.merge(task, source, fresh, as_is=True)
        state = TrainState(jnp.zeros((), jnp.int32), params, ())
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
