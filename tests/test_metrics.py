"""Metrics that can be computed by hand."""

import importlib
import math
import types

import numpy as np
import pytest
import sacrebleu

from transformer_jax.metrics import BLEU_TOKENIZERS, bleu, exact_match, loss_and_perplexity, missing_extra

SENTENCES = ["The cat sat on the mat .", "It is raining again today ."]


def test_bleu_of_the_references_is_100():
    scores = bleu(SENTENCES, SENTENCES)
    np.testing.assert_allclose((scores["bleu"], scores["bleu_tokenized"]), 100)
    assert "tok:13a" in scores["bleu_signature"]
    assert "case:mixed" in scores["bleu_signature"]


@pytest.mark.parametrize(
    ("hypotheses", "references", "expected"),
    [
        # precisions 5/6, 3/5, 2/4, 1/3: the second "the" has no match
        (["the cat sat on the mat"], ["the cat sat on a mat"], 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
        # a prefix: precisions 1, brevity exp(1 - 5/4)
        (["a b c d"], ["a b c d e"], 100 * np.exp(1 - 5 / 4)),
        # counts are summed over the corpus before they are divided: 9/10, 6/8, 3/6, 2/4
        (["a b c d e", "a b c d e"], ["a b c d e", "a b x d e"], 100 * (9 / 10 * 6 / 8 * 3 / 6 * 2 / 4) ** 0.25),
    ],
)
def test_bleu_by_hand(hypotheses, references, expected):
    scores = bleu(hypotheses, references)
    np.testing.assert_allclose((scores["bleu"], scores["bleu_tokenized"]), expected, rtol=1e-6)


def test_the_tokenized_reading_is_lower_cased_and_takes_tokens_as_given():
    lowered = bleu([line.lower() for line in SENTENCES], SENTENCES)
    assert lowered["bleu"] < 90
    np.testing.assert_allclose(lowered["bleu_tokenized"], 100)
    detached = bleu([line.replace(" .", ".") for line in SENTENCES], SENTENCES)
    np.testing.assert_allclose(detached["bleu"], 100)
    assert detached["bleu_tokenized"] < 90


TEXT = [
    "« He paid 1,000 € (yes!) » and I didn't see what he had bought there…",
    "我们今天去北京，天气很好，明天去上海。",
    "私は今日学校に行きました。",
    "나는오늘학교에갔습니다.",
]
REFERENCE = [
    "« He paid 1,000 £ (yes!) » and I didn't see what he had found there…",
    "我们今天去北京，天气不好，明天去上海。",
    "私は昨日学校に行きました。",
    "나는어제학교에갔습니다.",
]


@pytest.mark.parametrize("tokenizer", BLEU_TOKENIZERS)
def test_bleu_by_each_tokenizer_is_that_of_sacrebleu(tokenizer):
    if extra := missing_extra(tokenizer):
        pytest.skip(f"no MeCab: pip install -c constraints.txt -e '.[{extra}]'")
    scores = bleu(TEXT, REFERENCE, tokenizer)
    assert 0 < scores["bleu"] < 100
    direct = sacrebleu.BLEU(tokenize=tokenizer)
    assert scores["bleu"] == direct.corpus_score(TEXT, [REFERENCE]).score
    assert scores["bleu_signature"] == str(direct.get_signature())
    assert f"|tok:{tokenizer}" in scores["bleu_signature"]
    assert scores["bleu_tokenized"] == bleu(TEXT, REFERENCE)["bleu_tokenized"]


def test_tokenizers_give_scores_of_their_own():
    names = [name for name in BLEU_TOKENIZERS if not missing_extra(name)]
    assert len(names) >= 5
    assert len({bleu(TEXT, REFERENCE, name)["bleu"] for name in names}) == len(names)


def test_text_without_spaces_needs_a_tokenizer_that_splits_it():
    """The tokenizer 13a takes a Chinese sentence for one word, so nothing matches."""
    scores = {name: bleu(TEXT[1:2], REFERENCE[1:2], name)["bleu"] for name in ("13a", "zh", "char")}
    assert scores["13a"] == 0
    assert scores["zh"] == scores["char"] > 50


def without_mecab(monkeypatch, name):
    """Put a module of sacreBLEU into the state that it has after failed imports."""
    monkeypatch.setattr(importlib.import_module(f"sacrebleu.tokenizers.tokenizer_{name}"), "MeCab", None)


def test_what_mecab_needs_is_named_if_it_is_missing(monkeypatch):
    assert not any(missing_extra(name) for name in BLEU_TOKENIZERS if "mecab" not in name)
    without_mecab(monkeypatch, "ja_mecab")
    without_mecab(monkeypatch, "ko_mecab")
    assert (missing_extra("ja-mecab"), missing_extra("ko-mecab")) == ("ja", "ko")


def test_another_dictionary_than_that_of_sacrebleu_counts_as_missing(monkeypatch):
    module = importlib.import_module("sacrebleu.tokenizers.tokenizer_ja_mecab")
    small = types.SimpleNamespace(dictionary_info=lambda: types.SimpleNamespace(size=1, next=None))
    monkeypatch.setattr(module, "MeCab", types.SimpleNamespace(Tagger=lambda arguments: small))
    monkeypatch.setattr(module, "ipadic", types.SimpleNamespace(MECAB_ARGS=""), raising=False)
    assert missing_extra("ja-mecab") == "ja"


def test_exact_match():
    assert exact_match(["a", "b", "c", ""], ["a", "x", "c ", ""]) == 0.5
    with pytest.raises(ValueError, match="argument 2 is longer"):
        exact_match(["a"], ["a", "b"])


def test_perplexity_is_the_exponential_of_the_loss():
    assert loss_and_perplexity({"loss": math.log(7), "accuracy": 0.5}) == pytest.approx(
        {"loss": math.log(7), "perplexity": 7.0}
    )
    assert loss_and_perplexity({}) == {}


def test_the_perplexity_of_a_huge_loss_is_finite():
    scores = loss_and_perplexity({"loss": 1e6})
    assert scores["loss"] == 1e6
    assert scores["perplexity"] == math.exp(700)
