"""Properties of `training.task.Task` that generic code relies on, tested for every
task.
"""

import inspect
from abc import ABC
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from helpers.runs import parameters, small
from transformer_jax.config import fields, make_task, parse
from transformer_jax.data.batching import Batches
from transformer_jax.tasks import TASKS, config_class, task_class
from transformer_jax.tasks.chosen_scores import CHOSEN_BY
from transformer_jax.tasks.sequence_to_sequence_config import SEVERAL_REFERENCES
from transformer_jax.training import scoring
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh
from transformer_jax.training.task import (
    Config,
    Embedding,
    Growing,
    Inspected,
    Mean,
    Scoring,
    Task,
)

# Tasks, and keys that change what a batch is or what the loss computes.
GPT = {"fine_tuning.auxiliary_weight": 0.5}
PAIRS = {"data.second_column": "reversed", "fine_tuning.both_orders": True}
VARIANTS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    **{name: (name, None, {}) for name in TASKS},
    # short chunks, of which the first batch has several
    "denoising": ("denoising", None, {"data.max_length": 12}),
    "classification of GPT": ("classification", "gpt", GPT),
    "regression of GPT": ("regression", "gpt", GPT | PAIRS),
    "multiple choice of GPT": ("multiple_choice", "gpt", GPT),
    "convolutions": ("sequence_to_sequence", "convs2s", {}),
}
pytestmark = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture
def task(name, corpus, tmp_path):
    task, architecture, changes = VARIANTS[name]
    config = small(task, corpus, architecture)
    config.update_from_flattened_dict(changes)
    return make_task(parse(config), tmp_path / "run")


DRAWN: dict[str, Any] = {}


@pytest.fixture
def params(name, task):
    if name not in DRAWN:
        DRAWN[name] = parameters(task)
    return DRAWN[name]


def members(interface):
    """Return the public members of a class, with the attributes that it declares."""
    names = {*vars(interface), *vars(interface).get("__annotations__", {})}
    return {name for name in names if not name.startswith("_")}


def batch_of(task, split="val"):
    batches = task.batches(split, seed=None)
    return batches.load(batches.plan.batch(0))


def records_of(task, lines):
    """Return records that have the line as the text of every column that a
    prediction needs, behind the token of a language if there must be one.
    """
    (mark, *_) = (*getattr(task.config.data, "marks", ()), "")
    lines = [f"{mark} {line}".strip() for line in lines]
    return [dict.fromkeys(task.config.columns.inputs, line) for line in lines]


def test_it_implements_the_interface_directly(name):
    """Its classes are `Task`, possibly those for further members, and the last one."""
    cls = task_class(VARIANTS[name][0])
    assert not inspect.isabstract(cls)
    assert {*cls.__mro__[1:]} <= {
        Task,
        Growing,
        Scoring,
        Embedding,
        Inspected,
        ABC,
        object,
    }
    for interface in cls.__bases__:
        for member in members(interface) - {"metrics", "piece", "growing", "network"}:
            found, expected = (
                inspect.signature(getattr(x, member)).parameters.keys()
                for x in (cls, interface)
            )
            assert found == expected, member


def test_its_config_inherits_at_most_two_deep(name):
    config = config_class(VARIANTS[name][0])
    assert issubclass(config, Config)
    assert config.__mro__.index(Config) <= 2


def test_parameters_name_their_axes(task):
    boxes = jax.tree.leaves(
        jax.eval_shape(task.init, jax.random.key(0)),
        is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata),
    )
    for box in boxes:
        assert isinstance(box, nn.LogicallyPartitioned)
        assert len(box.names) == box.unbox().ndim


def test_a_dummy_batch_is_like_a_real_one(task):
    real, dummy = batch_of(task, "train"), task.dummy_batch(7, 11, seed=3)
    assert {name: (x.dtype, x.ndim) for name, x in dummy.items()} == {
        name: (x.dtype, x.ndim) for name, x in real.items()
    }
    assert {len(x) for x in dummy.values()} == {7}
    assert all(
        (x == 11).all()
        for name, x in task.dummy_batch(5, 11).items()
        if name.endswith("length")
    )
    assert (
        task.work(task.dummy_batch(4, 11)).tokens
        == 2 * task.work(task.dummy_batch(2, 11)).tokens
        > 0
    )
    assert task.work(dummy).flops > 0


def test_the_terms_of_the_loss_are_means(task, params):
    """Weights do not depend on the parameters.

    Rows that only fill a batch have no weight.
    """
    batch = task.dummy_batch(6, 9, seed=1)
    terms: dict[str, Mean] = {}

    @jax.jit  # without the sums, there is little to compile
    def weights(params, batch):
        terms.update(task.loss(params, batch, jax.random.key(1), 0))
        return {name: mean.weight for name, mean in terms.items()}

    others = jax.tree.map(lambda x: 1 - 2 * np.asarray(x), params)
    assert jax.device_get(weights(params, batch)) == jax.device_get(
        weights(others, batch)
    )
    assert all(isinstance(mean, Mean) for mean in terms.values())
    first, *_ = terms.values()
    assert first.scale

    def filled(batch):
        return {
            n: (
                np.zeros_like(x)
                if n.endswith("length")
                else np.full_like(x, -1)
                if n == "index"
                else x
            )
            for n, x in batch.items()
        }

    # Use evaluation, which has no dropout: dropout would draw other bits for another
    # row. Both batches have 12 rows, so one program evaluates them.
    evaluate = jax.jit(lambda params, batch: task.evaluate(params, batch, True)[0])
    once, twice = (
        jax.device_get(
            evaluate(
                params,
                {name: np.concatenate([x, more[name]]) for name, x in batch.items()},
            )
        )
        for more in (filled(batch), batch)
    )
    assert once
    for name, mean in once.items():
        assert float(mean.weight) > 0
        np.testing.assert_allclose(
            [2 * mean.sum, 2 * mean.weight],
            [twice[name].sum, twice[name].weight],
            rtol=1e-5,
        )


def test_a_dummy_batch_without_references_is_like_one_of_records(task):
    batches = task.batches_of(records_of(task, ["ek at", "it"]))
    real = batches.load(batches.plan.batch(0))
    dummy = task.dummy_batch(7, 11, references=False)
    assert dummy.keys() < task.dummy_batch(7, 11).keys()
    assert {x: (array.dtype, array.ndim) for x, array in real.items()} == {
        x: (array.dtype, array.ndim) for x, array in dummy.items()
    }
    params = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    means, outputs = jax.eval_shape(
        lambda params, batch: task.evaluate(params, batch, False), params, dummy
    )
    assert not means
    assert outputs


def test_training_batches_are_reproducible_and_numbered(task):
    first, again, other = (task.batches("train", seed) for seed in (5, 5, 6))
    numbers = range(2 * len(first.plan))
    assert [first.plan.batch(i).number for i in numbers] == list(numbers)
    for i in numbers:
        one, two = (batches.load(batches.plan.batch(i)) for batches in (first, again))
        for name, x in one.items():
            np.testing.assert_array_equal(x, two[name])
    different = [
        not np.array_equal(first.plan.batch(i).indices, other.plan.batch(i).indices)
        for i in range(len(first.plan))
    ]
    assert any(different)


def test_a_split_is_evaluated_in_one_pass_that_meets_every_example_once(
    task, params, monkeypatch
):
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    opened, batches = [], task.batches
    monkeypatch.setattr(
        task,
        "batches",
        lambda split, seed: opened.append(split) or batches(split, seed),
    )
    scores = [evaluator.evaluate(params, "val", greedy=True) for _ in range(2)]
    assert opened == ["val"]
    assert scores[0] == scores[1]
    assert {"loss", "examples"} <= set(scores[0])
    numbers = {key for key, value in scores[0].items() if not isinstance(value, str)}
    # here an example has one reference, and evaluation.text_scores is empty
    others = {*SEVERAL_REFERENCES, *CHOSEN_BY}
    assert numbers == {*task.metrics, "examples"} - others
    assert all(metric.label.startswith(key) for key, metric in task.metrics.items())
    split = task.batches("val", seed=None)
    numbers = np.concatenate(
        [split.plan.batch(i).indices for i in range(len(split.plan))]
    )
    assert sorted(numbers[numbers >= 0]) == list(range(scores[0]["examples"]))


def test_predictions_come_in_order_whatever_the_batch(task, params):
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    # those of one word are batched apart from the long one
    lines = ["ek", "em is ot uk", "ak", "ek"]
    records = records_of(task, lines)
    together = evaluator.predict(params, records, greedy=True)
    alone = [evaluator.predict(params, [record], greedy=True)[0] for record in records]
    assert len(together) == 4

    def rounded(prediction):
        return jax.tree.map(
            lambda x: pytest.approx(x, rel=1e-4) if isinstance(x, float) else x,
            prediction,
        )

    assert together == [rounded(prediction) for prediction in alone]
    assert together[0] == rounded(together[3])
    if task.config.columns.needed == 1:
        (column,) = task.config.columns.inputs
        lines = [record[column] for record in records]
        assert evaluator.predict(params, lines, greedy=True) == together


def test_what_looks_at_what_has_a_token_for_every_weight(task, params):
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    maps, _ = evaluator.attention(params, records_of(task, ["ek at", "it"]))
    assert maps
    assert any("ek at" in text for found in maps for text in found.texts.values())
    for found in maps:
        assert found.name
        assert found.texts
        assert found.weights.shape[2:] == (len(found.queries), len(found.keys))
        if found.name == "probability by CTC":  # of a word, at each position
            assert (found.weights >= 0).all()
            assert (found.weights <= 1 + 1e-5).all()
        else:
            np.testing.assert_allclose(found.weights.sum(axis=-1), 1, rtol=1e-4)


def test_a_preview_and_a_fingerprint(task):
    arrays = batch_of(task, "train")
    title, *lines = task.preview(arrays)
    assert title.startswith("the ")
    assert not any("Ġ" in line for line in lines)
    rolled = [
        task.preview({name: np.roll(x, -k, axis=0) for name, x in arrays.items()})
        for k in range(1, 4)
    ]
    assert any(lines != others[1:] for others in rolled)
    row = np.flatnonzero(arrays["index"] >= 0)[-1]
    for name in ("segment", *(x for x in arrays if x.endswith("_length"))):
        if name in arrays:
            arrays[name][row] = 0
    with pytest.raises(ValueError, match=f"row {row} of .* has no position"):
        task.preview(arrays)
    assert set(task.fingerprint(training=False)) < set(task.fingerprint(training=True))
    assert all(len(value) == 64 for value in task.fingerprint(training=True).values())


def test_scores_on_other_validation_data_mean_something_else(task):
    meanings = [
        scoring.of(task, task.batches(split, seed=None))
        for split in ("val", "val", "train")
    ]
    assert meanings[0] == meanings[1]
    assert meanings[0][scoring.VALIDATION] != meanings[2][scoring.VALIDATION]


def test_what_scores_mean_has_every_key_that_changes_them_and_may_change_in_a_run(task):
    free = {
        key
        for key, field in fields(task.config.task, {}).items()
        if field.metadata.get("free")
    }
    free = {
        key
        for key in free
        if key.partition(".")[0] not in ("training", "checkpoint", "mesh")
    }
    means = {key for key in scoring.of(task, Batches(None, None)) if "." in key}
    assert means <= free
    assert free - means <= {
        *(
            "data.directory",
            "data.vocabulary",
            "data.validation_split",
            "data.test_split",
            "data.meant_for",
        ),
        *("evaluation.checkpoint", "evaluation.average_last", "evaluation.batch_size"),
        *{
            key
            for key, field in fields(task.config.task, {}).items()
            if "how" in field.metadata
        },
    }
