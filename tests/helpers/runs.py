"""Small configs, and runs that train with them in seconds."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from helpers import ROOT
from transformer_jax import experiment
from transformer_jax.config import defaults
from transformer_jax.config import shrink as make_small
from transformer_jax.training.initialization import TrainState
from transformer_jax.training.task import Params, Task

RECIPE = """
from transformer_jax.config import defaults, parse_arg

def get_config(arg=None):
    choice = parse_arg(arg, {"norm": ("post", "pre")})
    config = defaults("sequence_to_sequence")
    config.data.directory = "DIRECTORY"
    config.data.max_length = 32
    config.data.batch_tokens = 1024
    config.data.max_buckets = 1
    model = config.model
    model.source_vocab_size = model.target_vocab_size = 300
    model.num_encoder_layers = model.num_decoder_layers = 1
    model.d_model = 16
    model.d_ff = 24
    model.num_heads = 2
    model.head_dim = model.value_dim = 8
    model.max_length = 32
    model.norm = choice["norm"]
    config.optimizer.warmup_steps = 10
    config.training.steps = 4
    config.training.log_every = 2
    config.training.evaluate_every = 2
    config.checkpoint.every = 2
    config.decoding.max_extra = 5
    return config
"""


# Task → keys of config.data that name what `write_corpus` writes.
IN_THE_CORPUS: dict[str, dict[str, Any]] = {
    "classification": {
        "text_column": "sentence",
        "label_column": "label",
        "labels": ("even", "odd"),
    },
    "regression": {"text_column": "sentence", "label_column": "value"},
    "multiple_choice": {
        "text_column": "sentence",
        "second_column": "",
        "choice_columns": ("reversed", "label"),
        "label_column": "number",
    },
    "tagging": {"types": ("LOC",)},
}


def shrink(config: ConfigDict, directory: Path, steps: int = 4) -> ConfigDict:
    """Shrink `config` in place to train on the corpus of `write_corpus` in seconds.

    Layers are a loop, because each unrolled layer is compiled. Other keys keep their
    values.
    """
    make_small(config)
    if "unroll" in config.model:
        config.model.unroll = 1
    data = config.data
    data.source = "files"
    data.directory = str(directory)
    data.update(IN_THE_CORPUS.get(config.task, {}))
    if data.get("second_column"):
        data.second_column = "reversed"
    every = 2
    config.training.steps = steps
    config.training.log_every = every
    config.training.evaluate_every = every
    config.checkpoint.every = every
    return config


def small(task: str, directory: Path, architecture: str | None = None) -> ConfigDict:
    """Return the defaults of a task, shrunk for the corpus of `write_corpus`."""
    return shrink(defaults(task, architecture), directory)


def run(config: ConfigDict, workdir: Path, **changes: Any) -> TrainState:
    """Train like scripts/train.py, with some keys changed, e.g. training__steps=6.

    Return the last state.
    """
    config = ConfigDict(config.to_dict())
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return experiment.run(config, workdir).state


def parameters(task: Task, seed: int = 0) -> Params:
    """Return random parameters of a task: scales near 1, all others near 0.

    NumPy draws them, because compiling `task.init` takes longer than most tests.
    """
    shapes = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    draw = np.random.default_rng(seed)

    def drawn(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        center = 1.0 if name == "scale" else 0.0
        return jnp.asarray(draw.normal(center, 0.2, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, shapes)


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [
        json.loads(line)
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]


def other_than(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    return (
        f"{value}x"
        if isinstance(value, str)
        else (*value, "x")
        if isinstance(value, tuple)
        else value + 1
    )


def get_config(name: str, arg: str) -> ConfigDict:
    """Return the config of a recipe in configs/."""
    path = ROOT / "configs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"configs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)
