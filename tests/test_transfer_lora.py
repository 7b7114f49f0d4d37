"""A run with LoRA that starts from a Hugging Face folder: training, evaluation,
prediction, and what must be trained.
"""

import json
import re

import numpy as np
import pytest
from flax import traverse_util

import transformer_jax
from helpers.bert_folders import PRETRAINING, T, drawn, save
from helpers.corpus import write_corpus
from helpers.runs import IN_THE_CORPUS, parameters
from transformer_jax import experiment, transfer
from transformer_jax.config import ConfigError, defaults, make_task, parse
from transformer_jax.interop import huggingface
from transformer_jax.training.engine import Engine

ATTENTION = "bert/encoder/layers/self_attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(
        tmp_path_factory.mktemp("base") / "base",
        {name: 0.2 * x for name, x in drawn(PRETRAINING).items()},
    )


def config_of(folder, corpus, **changes):
    config = defaults("classification")
    config.update_from_flattened_dict(transfer.keys_for(str(folder)))
    config.data.directory = str(corpus)
    config.data.update(IN_THE_CORPUS["classification"])
    config.data.max_length = T
    config.data.batch_tokens = 16 * T
    config.data.max_buckets = 1
    config.model.unroll = 1
    config.optimizer.schedule = "constant"
    config.optimizer.learning_rate = 0.01
    config.optimizer.warmup_steps = 0
    config.training.steps = config.training.evaluate_every = config.checkpoint.every = 3
    config.lora.rank = 2
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A workdir, its last state and its config."""
    path = tmp_path_factory.mktemp("run")
    write_corpus(path / "corpus")
    config = config_of(folder, path / "corpus")
    done = experiment.run(config, path / "run")
    return path / "run", done, config


def flat(tree):
    return {
        path: np.asarray(leaf)
        for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


def test_the_base_stays_that_of_the_folder(folder, trained):
    _, done, _ = trained
    base = flat(done.state.base)
    theirs = huggingface.read(folder).parameters
    for path, value in base.items():
        if not path.startswith("head/"):
            np.testing.assert_array_equal(value, np.asarray(theirs[path]))
    params = flat(done.state.params)
    assert params[f"{ATTENTION}/query/lora_b"].any()
    assert (params["head/kernel"] != base["head/kernel"]).all()


def test_predictors_have_merged_weights_and_the_scores_of_the_training(trained):
    path, done, _ = trained
    predictor = transformer_jax.load(path)
    params = flat(predictor.params)
    base = flat(done.state.base)
    state = flat(done.state.params)
    assert params.keys() == base.keys()
    changed = {key for key in params if (params[key] != base[key]).any()}
    assert changed == {
        f"{ATTENTION}/query/kernel",
        f"{ATTENTION}/value/kernel",
        "head/kernel",
        "head/bias",
    }
    a, b = (state[f"{ATTENTION}/value/lora_{x}"] for x in "ab")
    change = 16 / 2 * np.einsum("ldr,lrnh->ldnh", a, b)
    name = f"{ATTENTION}/value/kernel"
    np.testing.assert_allclose(params[name], base[name] + change, atol=1e-6)
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    (held_out,) = (row for row in rows if row.get("split") == "val")
    assert predictor.evaluate("val")["loss"] == held_out["loss"]
    assert predictor.predict(["xa xe"])[0]["label"] in ("even", "odd")


def test_keys_of_lora_belong_to_the_checkpoint(trained):
    path, _, config = trained
    with pytest.raises(ConfigError, match=r"do not change:\n  config.lora.alpha: 16.0"):
        transformer_jax.load(path, {"lora.alpha": 2.0})
    config = config.copy_and_resolve_references()
    config.lora.rank = 3
    with pytest.raises(ConfigError, match=r"another --workdir:\n  config.lora.rank: 2"):
        experiment.run(config, path)


@pytest.mark.parametrize(
    ("trained_whole", "message"),
    [
        (
            (),
            "keep at random values: "
            "add their modules to lora.fully_trained\n  bert/pooler",
        ),
        (("bert/pooler",), ""),
    ],
)
def test_new_parameters_must_be_trained(folder, tmp_path, trained_whole, message):
    """A folder without a pooler, which a classifier needs."""
    tensors = {k: x for k, x in drawn(PRETRAINING).items() if "pooler" not in k}
    save(tmp_path / "base", tensors, architectures=["BertForMaskedLM"])
    changes = {"lora__fully_trained": trained_whole}
    config = parse(config_of(tmp_path / "base", "(none)", **changes))
    task = make_task(config, tmp_path)
    engine = Engine(task)
    source = transfer.source_of(task, engine.mesh)
    fresh = parameters(task)
    if message:
        with pytest.raises(ConfigError, match=re.escape(message)):
            transfer.merge(task, source, fresh)
    else:
        transfer.merge(task, source, fresh)
        assert "kernel" in engine.form.trained["bert"]["pooler"]
