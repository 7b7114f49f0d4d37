"""Pre-training of encoder–decoders: sections, loss, evaluation and prediction."""

import re

import jax
import numpy as np
import pytest
from flax import traverse_util

import transformer_jax
from helpers.runs import parameters, run, small
from transformer_jax.config import ConfigError, defaults, make_task, parse
from transformer_jax.tasks.denoising import Denoising
from transformer_jax.training.sharding import make_mesh
from transformer_jax.transfer import merge, source_of


@pytest.fixture
def config(corpus):
    return small("denoising", corpus)


@pytest.fixture
def task(config, tmp_path):
    return make_task(parse(config), tmp_path / "run")


def flat(params):
    leaves = traverse_util.flatten_dict(params, sep="/")
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def test_the_defaults_are_those_of_t5():
    config = defaults("denoising")
    assert config.denoising.to_dict() == {
        "objective": "span_corruption",
        "rate": 0.15,
        "mean_length": 3.0,
        "permute_sentences": False,
    }
    assert config.data.sentinels == 100
    assert "input" not in config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"denoising.rate": 1.5}, "denoising.rate = 1.5: must be in (0, 1)"),
        (
            {"denoising.objective": "mlm"},
            "denoising.objective = 'mlm': must be one of span_corruption, text_infill",
        ),
        (
            {"denoising.permute_sentences": True},
            "denoising.permute_sentences = True: must be False with objective",
        ),
        (
            {"data.sentinels": 1},
            "data.sentinels = 1: must be at least 2, the most in a text of "
            "data.max_length = 32 with this denoising.rate and "
            "denoising.mean_length: set it to 2 or more",
        ),
        ({"data.sentinels": -1}, "data.sentinels = -1: must be at least 0, e.g. 100"),
        ({"data.source": "tfds", "data.name": "x"}, "must be 'files': a tfds data set"),
        ({"data.max_length": 3}, "must be at least 4: two tokens, the final sentinel"),
        (
            {"data.tokenizer": "bert", "data.vocabulary": "vocab.txt"},
            "must be '': a vocab.txt has no tokens that stand for missing text",
        ),
        (
            {"model.target_vocab_size": 300, "model.tie_embeddings": "decoder"},
            "model.target_vocab_size = 300: must be equal to model.source_vocab_size "
            "= 304: source and target have the same tokenizer",
        ),
        (
            {"data.max_length": 64},
            "must not exceed model.max_length = 32",
        ),
    ],
)
def test_what_cannot_work_is_refused(config, changes, message):
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse(config)
    assert "joint_tokenizer" not in str(error.value)


def test_text_infilling_needs_no_sentinels(config, tmp_path):
    config.denoising.objective = "text_infilling"
    config.data.sentinels = 0
    task = make_task(parse(config), tmp_path / "run")
    task.batches("train", seed=0)
    tokenizer = task.corpus.tokenizers["source"]
    assert tokenizer.mask_id == tokenizer.size - 1
    assert tokenizer.id_of("<extra_id_0>") is None


def test_source_and_target_have_one_tokenizer_with_all_marks(task, tmp_path):
    task.batches("train", seed=0)
    assert [path.name for path in (tmp_path / "run").glob("tokenizer*")] == [
        "tokenizer.json"
    ]
    tokenizers = task.corpus.tokenizers
    assert tokenizers["source"].sha256 == tokenizers["target"].sha256
    names = [*(f"<extra_id_{i}>" for i in range(16)), "<mask>"]
    ids = [tokenizers["source"].id_of(name) for name in names]
    size = tokenizers["source"].size
    assert ids == list(range(size - 17, size))


def test_the_borders_of_documents_are_part_of_the_data(config, corpus, tmp_path):
    hashes = []
    for number in range(2):
        task = make_task(parse(config), tmp_path / f"run{number}")
        hashes.append(task.fingerprint(training=True))
        text = (corpus / "train.txt").read_text()
        (corpus / "train.txt").write_text(text.replace("\n\n", "\n", 1))
    assert hashes[0]["training data"] != hashes[1]["training data"]


def test_an_evaluation_has_the_loss_of_training_and_writes_no_text(task):
    """Of training without smoothing and dropout."""
    assert task.config.training.label_smoothing == 0.1
    params = parameters(task)
    batches = task.batches("val", seed=None)
    batch = batches.load(batches.plan.batch(0))
    means, outputs = jax.jit(task.evaluate, static_argnums=2)(params, batch, False)
    assert not jax.tree.leaves(outputs)
    assert task.decode({}, batch) == [{}] * len(batch["index"])
    tokens = batch["target_length"].sum()
    assert means["loss"].weight == tokens
    expected = task.pairs.means(params, batch)["loss"]
    np.testing.assert_allclose(means["loss"].sum, expected.sum, rtol=1e-6)
    scores = task.score({"loss": 2.0}, [], [])
    assert scores == {"loss": 2.0, "perplexity": pytest.approx(np.exp(2))}
    assert set(Denoising.metrics) == set(scores)


def test_a_run_is_evaluated_predicts_and_is_fine_tuned(config, corpus, tmp_path):
    """Fine-tuning takes all parameters and the tokenizer."""
    config.training.steps = 2
    state = run(config, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    scores = [predictor.evaluate("val") for _ in range(2)]
    assert scores[0] == scores[1]
    numbers = {"loss", "perplexity", "examples", "step"}
    assert numbers <= set(scores[0])
    assert "bleu" not in scores[0]
    texts = predictor.predict(["ek <extra_id_0> it", "", "ek <extra_id_0> it"])
    assert texts[0] == texts[2]
    assert texts[1] == ""
    with pytest.raises(ValueError, match="line 1 has <extra_id_16>, which is no token"):
        predictor.predict(["ek <extra_id_16>"])

    translation = small("sequence_to_sequence", corpus)
    assert translation.model == config.model
    translation.init_from = str(tmp_path / "run")
    task = make_task(parse(translation), tmp_path / "tuned")
    fresh = parameters(task, 7)
    source = source_of(task, make_mesh(task.config.mesh))
    before = flat(state.params)
    after = flat(merge(task, source, fresh))
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    files = [tmp_path / name / "tokenizer.json" for name in ("run", "tuned")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_tokenizer_without_sentinels_is_refused(config, corpus, tmp_path):
    """E.g. that of a run of translation."""
    translation = small("sequence_to_sequence", corpus)
    make_task(parse(translation), tmp_path / "run").fingerprint(training=False)
    task = make_task(parse(config), tmp_path / "run")
    with pytest.raises(ValueError, match="the tokenizer has no <extra_id_0>, and"):
        task.batches("train", seed=0)
