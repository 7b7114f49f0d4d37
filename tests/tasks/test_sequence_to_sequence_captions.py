"""Several references and attention to a source that no encoder reads."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import modalities
from helpers.runs import get_config
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.tasks.chosen_scores import CHOSEN_BY
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh


def made(tmp_path, arg="", **keys):
    config = modalities.small_recipe("captions", arg, tmp_path / "corpus")
    config.training.attention_regularization = 0.0
    for key, value in keys.items():
        section, name = key.split("__")
        config[section][name] = value
    task = make_task(parse(config), tmp_path / "run")
    return task, nn.unbox(jax.jit(task.init)(jax.random.key(0)))


def batch_of(task, split):
    batches = task.batches(split, None)
    return batches.load(batches.plan.batch(0))


@pytest.mark.parametrize(
    "arg", ["", pytest.param("transformer", marks=pytest.mark.slow)]
)
def test_the_loss_over_all_references_is_that_of_one_at_a_time(tmp_path, arg):
    task, params = made(tmp_path, arg)
    arrays = batch_of(task, "val")

    @jax.jit
    def loss(params, batch):
        return task.evaluate(params, batch, True)[0]["loss"]

    together = loss(params, arrays)
    total = weight = 0.0
    for number in range(5):
        one = dict(arrays)
        for name in ("target", "target_length"):
            one[name] = arrays[name][:, number]
        mean = loss(params, one)
        total += float(mean.sum)
        weight += float(mean.weight)
    assert weight == float(together.weight) == arrays["target_length"].sum()
    assert total == pytest.approx(float(together.sum), rel=1e-5)


def test_scores_are_over_all_references(tmp_path):
    task, _ = made(tmp_path)
    references = [["a b c d", "x y"], ["e f", "g h"]]
    predictions = [{"text": "X y"}, {"text": "g h"}]
    scores = task.score({}, predictions, references)
    assert scores["exact_match"] == 0.5
    assert scores["bleu_2"] == pytest.approx(100)
    assert set(task.metrics) - {"loss", "perplexity", *CHOSEN_BY} <= set(scores)


def test_the_objective_has_the_unevenness_of_attention(tmp_path):
    task, params = made(
        tmp_path, training__attention_regularization=0.7, model__dropout_rate=0.0
    )
    batches = task.batches("train", 0)
    arrays = batches.load(batches.plan.batch(0))
    key = jax.random.key(0)
    means = jax.jit(lambda p: task.loss(p, arrays, key, 0))(params)
    assert means["uneven_attention"].scale == 0.7
    assert means["uneven_attention"].weight == means["cross_entropy"].weight
    maps, _ = jax.jit(task.attention)(params, arrays)
    weights = np.asarray(maps["alignment", "target", "source"])[:, 0, 0]
    expected = 0.0
    for row, length in zip(weights, arrays["target_length"], strict=True):
        if length:
            expected += ((1 - row[:length].sum(axis=0)) ** 2).sum()
    np.testing.assert_allclose(means["uneven_attention"].sum, expected, rtol=1e-4)
    plain = task.evaluate(params, jax.tree.map(jnp.asarray, arrays), True)[0]
    assert set(plain) == {"loss"}


def test_a_record_is_a_path_or_an_object(tmp_path):
    task, params = made(tmp_path)
    grids = np.load(tmp_path / "corpus" / "test.image.npy")
    file = str(tmp_path / "grid.npy")
    np.save(file, grids[0])
    records = [file, json.dumps({"image": file}), {"image": grids[0]}]
    found = Evaluator(task, make_mesh(task.config.mesh)).predict(params, records)
    assert found[0] == found[1] == found[2]


def test_the_log_names_the_terms_of_the_objective():
    config = get_config("captions", "")
    config.data.directory = "somewhere"
    assert parse(config).training.loss_label == "loss (with label smoothing)"
    config.training.attention_regularization = 1.0
    terms = "label smoothing and attention regularization"
    assert parse(config).training.loss_label == f"loss (with {terms})"
    config.training.label_smoothing = 0.0
    expected = "loss (with attention regularization)"
    assert parse(config).training.loss_label == expected
    config.training.attention_regularization = 0.0
    assert parse(config).training.loss_label == "loss"


@pytest.mark.parametrize(
    ("arg", "keys", "message"),
    [
        ("", {"data.references": 1}, "config.checkpoint.best_metric = 'bleu_4': needs"),
        ("", {"data.references": 0}, "config.data.references = 0: must be at least 1"),
        (
            "transformer",
            {"training.attention_regularization": 1.0},
            "attention_regularization = 1.0: needs a recurrent model with attention",
        ),
        (
            "",
            {"training.attention_regularization": -1.0},
            "attention_regularization = -1.0: must be at least 0",
        ),
        ("", {"model.attention": "dot"}, "context_gate = True: needs attention = 'add"),
        (
            "",
            {"model.bidirectional": True},
            "bidirectional = True: needs encoder = 're",
        ),
        (
            "",
            {"input.modality": "tokens", "model.encoder_dim": 300},
            "encoder_dim = 300: must be equal to model.embedding_dim = 256 with",
        ),
        ("", {"data.max_length": 41}, "max_length = 41: must not exceed model.max_len"),
        ("", {"data.table": ""}, "data.table = '': must name a table with input.mod"),
        ("", {"data.source": "tfds"}, "data.references = 5: must be 1 with data.sour"),
        ("", {"input.grid_positions": "x"}, "grid_positions = 'x': must be one of le"),
        ("", {"input.image_size": (0, 3)}, r"image_size = \(0, 3\): must be \(rows,"),
        ("", {"input.channels": (12,)}, r"channels = \(12,\): must be one or more mul"),
        ("", {"input.blocks": 0}, "blocks = 0: must be at least 1"),
        ("", {"input.shift": -1}, "shift = -1: must be at least 0"),
        (
            "",
            {"input.modality": "frames", "input.blind": True},
            "blind = True: needs modality = 'grid' or 'image'",
        ),
    ],
)
def test_settings_that_cannot_be(arg, keys, message):
    config = get_config("captions", arg)
    config.data.directory = "somewhere"
    for key, value in keys.items():
        section, name = key.split(".")
        config[section][name] = value
    with pytest.raises(ConfigError, match=message):
        parse(config)
