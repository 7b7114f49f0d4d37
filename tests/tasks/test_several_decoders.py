"""One encoder with a decoder for each target language."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax
from helpers.runs import run, small
from transformer_jax.config import make_task, parse
from transformer_jax.training.sharding import RULES

DIRECTIONS = ("en-de", "en-fr", "fr-en")
MARKS = ("<2de>", "<2fr>", "<2en>")


@pytest.fixture
def config(corpus):
    config = small("several_decoders", corpus)
    config.data.directions = DIRECTIONS
    config.data.update(source_language="source", target_language="target")
    config.model.tie_embeddings = "decoder"
    return config


@pytest.fixture
def task(config, tmp_path):
    return make_task(parse(config), tmp_path / "run")


def loaded(batches):
    return [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]


def test_a_batch_has_one_target_language_and_no_token_of_it(task):
    targets = {}
    for batch in loaded(task.batches("train", seed=0)):
        is_filled = batch["index"] >= 0
        (group,) = set(batch["group"][is_filled].tolist())
        for row in np.flatnonzero(is_filled):
            ids = batch["target"][row, : batch["target_length"][row]]
            text = task.corpus.tokenizers["target"].decode(ids)
            targets.setdefault(MARKS[group], []).append(text)
        sources = batch["source"][is_filled]
        assert not np.isin(sources, list(marks(task).values())).any()
    for mark, of_language in targets.items():
        lines = task.corpus.open(f"train:{of(mark)}").column("target")
        assert sorted(of_language) == sorted(lines)


def marks(task):
    ids = {mark: task.corpus.tokenizers["source"].id_of(mark) for mark in MARKS}
    return {mark: i for mark, i in ids.items() if i is not None}


def of(mark):
    (direction,) = (
        pair for pair in DIRECTIONS if pair.endswith(f"-{mark.strip('<2>')}")
    )
    return direction


def test_each_decoder_is_new_and_all_read_one_encoder(task):
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    one = nn.unbox(jax.jit(task.pairs.init)(jax.random.key(0)))
    assert {*params["encoder"], *params["decoders"]} == set(one)
    assert set(params["encoder"]) == {"encoder", "source_embedding"}
    for name, of_name in params["decoders"].items():
        stacked = jax.tree.map(lambda leaf: (3, *leaf.shape), one[name])
        assert jax.tree.map(jnp.shape, of_name) == stacked
    (table,) = jax.tree.leaves(params["decoders"]["target_embedding"])
    assert len({first.tobytes() for first in np.asarray(table)[:, 5]}) == 3
    names = {name for name, _ in RULES}
    boxes = jax.tree.leaves(
        boxed["decoders"], is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
    )
    for box in boxes:
        assert box.names[0] == "decoders"
        assert set(box.names) <= names
        assert len(box.names) == box.value.ndim


def test_a_tied_table_belongs_to_the_encoder(config, tmp_path):
    config.model.tie_embeddings = "all"
    task = make_task(parse(config), tmp_path / "run")
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert set(params["encoder"]) == {"encoder", "target_embedding"}
    assert set(params["decoders"]) == {"decoder"}


def decoder_of(params, number):
    return jax.tree.map(lambda leaf: leaf[number], params["decoders"])


def test_the_loss_is_that_of_the_encoder_with_the_decoder_of_the_batch(task):
    params = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    key = jax.random.key(1)
    seen = set()

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        mean = task.loss(params, batch, key, 0)["loss"]
        return mean.sum / mean.weight

    @jax.jit
    def expected(params, batch):
        return task.pairs.loss(params, batch, key, 0)["loss"]

    for batch in loaded(task.batches("val", seed=None)):
        (number,) = set(batch["group"][batch["index"] >= 0].tolist())
        if number in seen:
            continue
        seen.add(number)
        value, gradients = loss(params, batch)
        mean = expected({**params["encoder"], **decoder_of(params, number)}, batch)
        np.testing.assert_allclose(value, mean.sum / mean.weight, rtol=1e-6)
        for leaf in jax.tree.leaves(gradients["decoders"]):
            others = np.delete(np.asarray(leaf), number, axis=0)
            assert not others.any()
        sizes = jax.tree.map(jnp.abs, gradients)
        assert max(leaf.max() for leaf in jax.tree.leaves(sizes["encoder"])) > 0
        assert max(leaf.max() for leaf in jax.tree.leaves(sizes["decoders"])) > 0
    assert seen == {0, 1, 2}


def test_it_is_trained_scored_and_used_in_each_direction(config, tmp_path, corpus):
    run(config, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    lines = len((corpus / "test.de").read_text().splitlines())
    splits = ("test", *(f"test:{direction}" for direction in (*DIRECTIONS, "de-fr")))
    scores = [predictor.evaluate(split) for split in splits]
    assert [score["examples"] for score in scores] == [3 * lines, *[lines] * 4]
    losses = [score["loss"] for score in scores]
    assert len(set(losses)) == 5
    np.testing.assert_allclose(losses[0], np.mean(losses[1:4]), rtol=0.05)

    given = ["<2de> eka", "", "<2fr> eka", "<2de> eka"]
    texts = predictor.predict(given)
    assert texts[1] == ""
    assert texts[0] == texts[3]
    (maps, *_) = predictor.attention(given[2:3])
    assert "<2fr>" not in maps[0].queries


def test_without_directions_it_is_refused(config):
    config.data.directions = ()
    with pytest.raises(ValueError, match=re.escape("data.directions = (): must name")):
        parse(config)
