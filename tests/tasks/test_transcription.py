"""Transcription by attention, by CTC, and by both, of sounds of a few words."""

import functools
import logging

import flax.linen as nn
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import transformer_jax
from helpers import modalities, oracle
from helpers.runs import get_config, run, shrink
from transformer_jax.config import defaults, make_task, parse
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.streams import SpecialIds
from transformer_jax.tasks.transcription import aligned_positions
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.sharding import make_mesh

MODELS = ("attention", "ctc", "joint", "las")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    modalities.write_sounds(directory)
    return directory


def small(corpus, model, **changes):
    recipe = "joint" if model == "convolutions" else model
    config = ConfigDict(get_config("speech", f"model={recipe}").to_dict())
    if model == "convolutions":
        with config.unlocked():
            config.model = defaults("transcription", "convs2s").model
    shrink(config, corpus)
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


@functools.cache
def made(corpus, model, workdir):
    """Return a task and parameters of it."""
    task = make_task(parse(small(corpus, model)), workdir)
    task.fingerprint(training=True)
    return task, params_of(task)


def params_of(task):
    return oracle.randomized(nn.unbox(jax.eval_shape(task.init, jax.random.key(0))))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def first_batch(task, split="val"):
    batches = task.batches(split, seed=None)
    return batches.load(batches.plan.batch(0))


@pytest.mark.parametrize(
    ("model", "parts", "decoder"),
    [
        ("attention", {"model"}, True),
        ("ctc", {"model", "ctc"}, False),
        ("joint", {"model", "ctc"}, True),
        ("las", {"model"}, True),
        ("convolutions", {"model", "ctc"}, True),
    ],
)
def test_a_model_has_the_parameters_that_it_needs(
    corpus, workdir, model, parts, decoder
):
    _, params = made(corpus, model, workdir)
    assert params.keys() == parts
    assert ("decoder" in params["model"]) == decoder
    assert ("target_embedding" in params["model"]) == decoder


def test_the_objective_is_the_weighted_sum_of_both_losses(corpus, workdir):
    task, params = made(corpus, "joint", workdir)
    batch = first_batch(task)
    key = jax.random.key(0)
    terms = jax.jit(task.loss)(params, batch, key, 0)
    weight = task.config.training.ctc_weight
    assert {name: mean.scale for name, mean in terms.items()} == {
        "attention": 1 - weight,
        "ctc": weight,
    }
    tokens = batch["target_length"].sum()
    assert {float(mean.weight) for mean in terms.values()} == {tokens}
    assert task.score({"attention": 1.0, "ctc": 3.0}, [{"text": "a"}], ["a"])[
        "loss"
    ] == pytest.approx(1 + 2 * weight)


@pytest.mark.parametrize("model", ["joint", "convolutions"])
def test_a_loss_does_not_see_padding(corpus, workdir, model):
    task, params = made(corpus, model, workdir)
    batch = first_batch(task)
    changed = {
        name: np.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()
    }
    changed["source"] = np.pad(changed["source"], [(0, 0), (0, 3), (0, 0)])
    places = np.arange(changed["source"].shape[1])[None]
    padding = places >= changed["source_length"][:, None]
    changed["source"] = np.where(padding[:, :, None], 7, changed["source"])
    changed["source"] = changed["source"].astype(np.float32)

    @jax.jit
    def means(params, batch):
        return task.evaluate(params, batch, True)[0]

    expected = means(params, batch)
    for name, mean in means(params, changed).items():
        np.testing.assert_allclose(mean.sum, expected[name].sum, rtol=1e-5)
        assert mean.weight == expected[name].weight


@pytest.mark.parametrize("model", ["ctc", "joint", "convolutions"])
def test_scores_of_a_search_are_those_of_the_loss(corpus, workdir, model):
    task, params = made(corpus, model, workdir)
    checks = task.checks(params, first_batch(task))
    assert "scores of CTC = loss of CTC" in checks
    assert len(checks) == (1 if model == "ctc" else 3)
    for name, difference in checks.items():
        assert difference < 1e-5, name


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("ctc", {"beam_size": 1}),
        ("ctc", {"beam_size": 3, "n_best": 2}),
        ("joint", {"ctc_weight": 0.5}),
    ],
)
def test_an_output_does_not_depend_on_the_other_recordings(
    corpus, workdir, model, options
):
    """An empty one has no words."""
    task, params = made(corpus, model, workdir)
    config = small(corpus, model, evaluation__batch_size=3)
    config.decoding.update(options)
    task = make_task(parse(config), workdir)
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    files = modalities.entries("frames", corpus)
    empty = {"file": np.zeros(0, np.int16)}
    found = evaluator.predict(params, [*files, empty])
    (alone,) = evaluator.predict(params, files[1:])
    outputs = [row.get("hypotheses", [row]) for row in (found[1], alone, found[2])]
    together, alone, nothing = outputs
    assert [row["text"] for row in together] == [row["text"] for row in alone]
    for one, other in zip(together, alone, strict=True):
        assert one["score"] == pytest.approx(other["score"], rel=1e-4)
    assert [row["text"] for row in nothing] == [""]


@pytest.mark.parametrize("model", ["ctc", "joint"])
def test_rules_for_single_tokens_change_no_empty_recording(corpus, workdir, model):
    """Nor a row that only fills a batch: the first batch has two of them."""
    _, params = made(corpus, model, workdir)
    config = small(corpus, model, evaluation__batch_size=3)
    config.decoding.update({"min_tokens": 2, "first_id": 4, "beam_size": 2})
    task = make_task(parse(config), workdir)
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    files = modalities.entries("frames", corpus)
    (alone,) = evaluator.predict(params, files[:1])
    empty = {"file": np.zeros(0, np.int16)}
    found, nothing = evaluator.predict(params, [files[0], empty])
    assert found["text"] == alone["text"] != ""
    assert nothing["text"] == ""


def test_an_id_that_no_output_contains(corpus, workdir, monkeypatch):
    task, _ = made(corpus, "joint", workdir)
    for special, unused in [
        (SpecialIds(1, 2, 0), 0),
        (SpecialIds(1, 2, None), 1),
        (SpecialIds(2, 2, 0), 0),
    ]:
        monkeypatch.setattr(task.corpus, "special_ids", lambda _, ids=special: ids)
        assert task._unused_id() == unused
    only_end = SpecialIds(2, 2, None)
    monkeypatch.setattr(task.corpus, "special_ids", lambda _: only_end)
    with pytest.raises(ValueError, match="together needs a tokenizer with an id for"):
        task.preview({})


def without_randomness(corpus, **changes):
    """Return a task without masks, dropout and label smoothing, but for `changes`."""
    off = {
        "input__frequency_masks": 0,
        "input__time_masks": 0,
        "model__dropout_rate": 0.0,
        "training__label_smoothing": 0.0,
    }
    return parse(small(corpus, "joint", **(off | changes)))


def test_masks_in_time_change_the_loss_and_no_evaluation(corpus, workdir):
    task = make_task(without_randomness(corpus, input__time_masks=2), workdir)
    params = params_of(task)
    batch = first_batch(task)
    loss = jax.jit(task.loss)
    masked = [loss(params, batch, jax.random.key(seed), 0) for seed in (0, 1)]
    evaluated, _ = jax.jit(task.evaluate, static_argnums=2)(params, batch, True)
    plain = make_task(without_randomness(corpus), workdir)
    unmasked = jax.jit(plain.loss)(params, batch, jax.random.key(0), 0)
    for name in ("attention", "ctc"):
        assert masked[0][name].sum != masked[1][name].sum
        assert masked[0][name].sum != unmasked[name].sum
        expected = pytest.approx(float(unmasked[name].sum), rel=1e-5)
        assert evaluated[name].sum == expected


def test_labels_are_smoothed_for_attention_and_not_for_ctc(corpus, workdir):
    sums = []
    for smoothing in (0.0, 0.1):
        config = without_randomness(corpus, training__label_smoothing=smoothing)
        task = make_task(config, workdir)
        terms = jax.jit(task.loss)(
            params_of(task), first_batch(task), jax.random.key(0), 0
        )
        sums.append({name: float(mean.sum) for name, mean in terms.items()})
    assert sums[1]["ctc"] == pytest.approx(sums[0]["ctc"], rel=1e-5)
    assert abs(sums[1]["attention"] / sums[0]["attention"] - 1) > 1e-3


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_texts_of_a_synthetic_batch_have_an_alignment(corpus, seed):
    task = make_task(parse(small(corpus, "ctc")), None)
    batch = task.dummy_batch(64, 12, seed)
    rows = zip(batch["target"], batch["target_length"], strict=True)
    texts = [row[:length].tolist() for row, length in rows]
    needed = aligned_positions(Ragged.of(texts))
    room = np.array([task.positions(length) for length in batch["source_length"]])
    assert (needed <= room).all()
    assert (needed == room).any()
    assert all(text[-1] == 2 and 2 not in text[:-1] for text in texts)
    places = np.arange(batch["target"].shape[1])
    assert (batch["target"][places >= batch["target_length"][:, None]] == 0).all()
    params = params_of(task)
    for difference in task.checks(params, batch).values():
        assert difference < 1e-5


def of_texts(directory, **changes):
    """Return a config of CTC that reads texts."""
    for split, count in {"train": 30, "val": 6, "test": 6}.items():
        sources = ["a b c d", "b a d c e f"] * (count // 2)
        targets = ["a b c", "b"] * (count // 2)
        (directory / f"{split}.file").write_text("\n".join(sources) + "\n")
        (directory / f"{split}.text").write_text("\n".join(targets) + "\n")
    config = small(directory, "ctc", input__modality="tokens", **changes)
    config.input.frequency_masks = config.input.time_masks = 0
    config.input.convolution_channels = 0
    return config


def test_a_text_is_read_too_and_an_empty_line_stays_empty(tmp_path):
    config = of_texts(tmp_path, decoding__beam_size=3)
    task = make_task(parse(config), tmp_path / "run")
    task.fingerprint(training=True)
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    params = params_of(task)
    params["ctc"]["bias"][4:7] = 99  # the labels a, b and c
    found = evaluator.predict(params, ["a b c", "", " "])
    assert [prediction["text"] == "" for prediction in found] == [False, True, True]
    batch = task.dummy_batch(64, 12, seed=1)
    assert (batch["target_length"][batch["source_length"] == 1] == 1).all()


def test_training_data_follows_the_rules_of_every_pair(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = of_texts(tmp_path, data__max_ratio=3.0, data__meant_for=(99, 0))
    task = make_task(parse(config), tmp_path / "run")
    batches = task.batches("train", seed=0)
    assert sorted(batches.plan.kept) == [*range(0, 30, 2)]
    assert "left out: 15 above data.max_ratio = 3" in caplog.text
    assert "meant for at least 99" in caplog.text
    assert batches.baseline() > 0


def test_a_text_needs_a_position_for_each_label_and_between_equal_neighbours():
    texts = Ragged.of([[5, 6, 2], [5, 5, 2], [2], [5, 5, 5, 6, 6, 2], [6, 2]])
    assert aligned_positions(texts).tolist() == [2, 3, 0, 8, 1]


def test_a_recording_too_short_for_its_text_is_left_out_of_training(
    corpus, tmp_path, caplog
):
    """It is named by file and line, and still evaluated, without a loss of CTC."""
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for split in ("train", "val"):
        path = tmp_path / f"{split}.tsv"
        lines = path.read_text().splitlines()
        lines[2] = lines[2].split("\t")[0] + "\tone one one one one"
        lines[4] = lines[4].split("\t")[0] + "\t" + "one " * 999  # too long
        path.write_text("\n".join(lines) + "\n")
    caplog.set_level(logging.INFO)
    task = make_task(parse(small(tmp_path, "ctc")), tmp_path / "run")
    kept = task.batches("train", seed=0).plan.kept
    assert sorted(kept) == [0, 2, *range(4, 30)]
    assert "train.tsv:5" not in caplog.text
    assert (
        "train.tsv:3 is left out: CTC needs 9 positions for the text, "
        "and the encoder makes 4 of the recording"
    ) in caplog.text
    assert "max_length = 32, 1 with too few positions for CTC" in caplog.text
    batch = first_batch(task)
    params = params_of(task)
    means, _ = jax.jit(task.evaluate, static_argnums=2)(params, batch, True)
    others = batch["target_length"][batch["target_length"] < 6]
    assert means["ctc"].weight == others.sum()
    assert means["ctc"].sum < 1e3


def test_the_report_shows_the_probabilities_of_ctc(corpus, workdir):
    task, params = made(corpus, "joint", workdir)
    evaluator = Evaluator(task, make_mesh(task.config.mesh))
    files = modalities.entries("frames", corpus)
    source, target = task.config.columns.inputs[0], task.config.data.target_language
    record = {source: files[0], target: "two one two"}
    (maps,) = evaluator.attention(params, [record])
    by_name = {found.name: found for found in maps}
    by_label = by_name["probability by CTC"]
    across = by_name["cross-attention"]
    assert by_label.keys[:2] == ["0.00 s", "0.04 s"]
    assert across.keys == by_label.keys
    assert across.weights.shape[3] == len(across.keys)
    assert by_label.queries == ["two", "one", "two", "–"]
    assert by_label.picture is not None

    batches = task.batches_of(files[:1])
    batch = batches.load(batches.plan.batch(0))
    posteriors = np.exp(task._posteriors(params, batch))[0]  # (S', V)
    (ids,) = task.corpus.tokenizers["target"].encode_batch(["two one two"])
    expected = posteriors[: len(by_label.keys), [*ids[:3], task.blank]].T
    np.testing.assert_allclose(by_label.weights[0, 0], expected, rtol=1e-5)


@pytest.mark.slow
def test_it_trains_evaluates_and_predicts(corpus, tmp_path):
    """tests/integration/test_configs.py does so with CTC."""
    run(small(corpus, "las"), tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    scores = predictor.evaluate("test")
    assert scores["examples"] == 7
    edits = ("substitutions", "deletions", "insertions")
    rate = sum(scores[name] for name in edits)
    assert scores["word_error_rate"] == pytest.approx(rate)
    assert scores["loss"] > 0
    files = modalities.entries("frames", corpus)
    assert all(isinstance(text, str) for text in predictor.predict(files))
