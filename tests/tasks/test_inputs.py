"""Sources that are not text, from files to scores and attention maps."""

import functools
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax
from helpers import modalities
from helpers.runs import run
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.report.attention import Sentence, write_report
from transformer_jax.report.curves import score_by_length
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

# test_configs.py runs the others
RECIPES = {"image, recurrent": ("digits", ""), "sound": ("spoken_digits", "")}
pytestmark = pytest.mark.parametrize(
    "name", ["image, recurrent", pytest.param("sound", marks=pytest.mark.slow)]
)


@pytest.fixture
def config(name, tmp_path):
    return modalities.small_recipe(*RECIPES[name], tmp_path / "corpus")


@pytest.fixture
def task(config, tmp_path):
    return make_task(parse(config), tmp_path / "run")


INITIAL: dict[str, Any] = {}


@pytest.fixture
def params(name, task):
    if name not in INITIAL:
        INITIAL[name] = nn.unbox(jax.jit(task.init)(jax.random.key(0)))
    return INITIAL[name]


def first_batch(task, split="val"):
    batches = task.batches(split, seed=None)
    return batches.load(batches.plan.batch(0))


def losses(task, params, batch):
    """Return the sum and the weight of the loss."""
    found = jax.jit(lambda p, b: task.evaluate(p, b, True)[0]["loss"])(params, batch)
    return [float(found.sum), float(found.weight)]


def test_a_dummy_batch_is_like_a_real_one(task):
    real = first_batch(task)
    dummy = task.dummy_batch(7, 11, seed=3)
    assert real["source"].dtype == np.float32
    assert real["source"].ndim == 3
    assert {name: (x.dtype, x.ndim, x.shape[2:]) for name, x in dummy.items()} == {
        name: (x.dtype, x.ndim, x.shape[2:]) for name, x in real.items()
    }
    work = task.work(dummy)
    assert work.tokens == dummy["target_length"].sum()
    assert work.flops > 0


def test_padding_of_a_source_changes_nothing(task, params):
    batch = first_batch(task)
    changed = {
        name: np.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()
    }
    changed["source"] = np.pad(changed["source"], [(0, 0), (0, 3), (0, 0)])
    if task.streams["source"].limit < changed["source"].shape[1]:
        changed["source"] = changed["source"][:, : task.streams["source"].limit]
    positions = np.arange(changed["source"].shape[1])[None]
    padding = positions >= changed["source_length"][:, None]
    changed["source"] = np.where(padding[:, :, None], 7.0, changed["source"])
    changed["source"] = changed["source"].astype(np.float32)
    np.testing.assert_allclose(
        losses(task, params, changed), losses(task, params, batch), rtol=1e-5
    )


def test_every_position_of_a_source_matters(task, params):
    batch = {name: jnp.asarray(x) for name, x in first_batch(task).items()}

    def loss(source):
        return task.evaluate(params, {**batch, "source": source}, True)[0]["loss"].sum

    gradient = np.asarray(jax.jit(jax.grad(loss))(batch["source"]))
    positions = np.arange(gradient.shape[1])[None]
    inside = positions < np.asarray(batch["source_length"])[:, None]
    assert (np.abs(gradient).max(axis=-1) > 0)[inside].all()
    assert not gradient[~inside].any()


def test_predictions_do_not_depend_on_how_a_record_names_its_source(
    task, params, tmp_path
):
    column = task.config.columns.names[0]
    source = task.corpus.open("test").column(column)
    files = modalities.entries(task.config.input.modality, tmp_path / "corpus")
    records = [
        *files,
        {column: source[0]},
        {column: source[0].tolist()},
        {column: source[1].astype(np.int64)},
    ]
    if task.config.input.modality == "grid":  # numbers other than bytes are as they are
        records[3:] = [{column: (source[i] / 255).tolist()} for i in range(2)]
        records.append(json.dumps((source[1] / 255).tolist()))
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    task.fingerprint(training=True)
    found = evaluator.predict(params, records, greedy=True)
    alone = evaluator.predict(params, files[:1], greedy=True)
    assert [row["text"] for row in found[:2]] == [found[2]["text"], found[4]["text"]]
    assert found[0]["score"] == pytest.approx(found[2]["score"], rel=1e-5)
    assert found[0]["score"] == pytest.approx(found[3]["score"], rel=1e-5)
    assert found[0]["score"] == pytest.approx(alone[0]["score"], rel=1e-5)


def test_the_records_of_a_split_are_its_source(task, params):
    """Predictions from them are those of an evaluation."""
    task.fingerprint(training=True)
    batches = task.batches("val", seed=None)
    again = task.batches_of(batches.records)
    np.testing.assert_array_equal(again.lengths, batches.lengths)
    for number in range(len(batches.plan)):
        expected = batches.load(batches.plan.batch(number))
        found = again.load(again.plan.batch(number))
        np.testing.assert_array_equal(found["source"], expected["source"])


def test_cached_decoding_is_exact_and_causal(task, params):
    for name, difference in task.checks(params, task.dummy_batch(3, 6, seed=1)).items():
        assert difference < 1e-5, name


def test_it_trains_and_its_attention_is_drawn(config, tmp_path):
    run(config, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    scores = predictor.evaluate("test")
    assert scores["examples"] == 7
    batches = predictor.task.batches("test", None)
    found = predictor.predict(batches.records, scored=True)
    by_length = score_by_length(
        batches.records,
        found,
        batches.references,
        [9],
        "exact_match",
        functools.partial(predictor.task.score, {}),
        batches.lengths,
    )
    right = sum(part.examples * part.score for part in by_length)
    assert right == pytest.approx(7 * scores["exact_match"])
    assert sum(part.examples for part in by_length) == 7
    files = modalities.entries(config.input.modality, tmp_path / "corpus")
    (maps, _) = predictor.attention([files[0], files[1]])
    for found in maps:
        assert found.weights.shape[2:] == (len(found.queries), len(found.keys))
        np.testing.assert_allclose(found.weights.sum(axis=-1), 1, rtol=1e-4)
    across = next(m for m in maps if m.name in ("alignment", "cross-attention"))
    first = {"grid": "1,1", "frames": "0.00 s"}[config.input.modality]
    assert across.keys[0] == first
    write_report(tmp_path / "report.html", "Report", [Sentence(files[0], maps)])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.joint_tokenizer", True),
        ("data.max_ratio", 2.0),
        ("data.source", "tfds"),
        ("input.modality", "smell"),
        ("input.mel_bands", 0),
        ("input.sample_rate", 10),
        ("input.grid_shape", (16, 24)),
        ("input.cell_size", 5),
    ],
)
def test_what_only_text_has_and_impossible_sizes_are_refused(config, key, value):
    config.data.name = "any"
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        parse(config)
