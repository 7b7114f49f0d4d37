"""Metrics that can be computed by hand."""

import importlib
import math
import types

import numpy as np
import pytest
import sacrebleu

from transformer_jax.metrics import (
    BLEU_TOKENIZERS,
    bleu,
    caption_scores,
    exact_match,
    f1,
    loss_and_perplexity,
    matthews,
    missing_extra,
    pearson,
    spearman,
)

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
        (
            ["the cat sat on the mat"],
            ["the cat sat on a mat"],
            100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25,
        ),
        # a prefix: precisions 1, brevity exp(1 - 5/4)
        (["a b c d"], ["a b c d e"], 100 * np.exp(1 - 5 / 4)),
        # counts are summed over the corpus before they are divided: 9/10, 6/8, 3/6, 2/4
        (
            ["a b c d e", "a b c d e"],
            ["a b c d e", "a b x d e"],
            100 * (9 / 10 * 6 / 8 * 3 / 6 * 2 / 4) ** 0.25,
        ),
    ],
)
def test_bleu_by_hand(hypotheses, references, expected):
    scores = bleu(hypotheses, references)
    np.testing.assert_allclose(
        (scores["bleu"], scores["bleu_tokenized"]), expected, rtol=1e-6
    )


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
    scores = {
        name: bleu(TEXT[1:2], REFERENCE[1:2], name)["bleu"]
        for name in ("13a", "zh", "char")
    }
    assert scores["13a"] == 0
    assert scores["zh"] == scores["char"] > 50


def without_mecab(monkeypatch, name):
    """Put a module of sacreBLEU into the state that it has after failed imports."""
    monkeypatch.setattr(
        importlib.import_module(f"sacrebleu.tokenizers.tokenizer_{name}"), "MeCab", None
    )


def test_what_mecab_needs_is_named_if_it_is_missing(monkeypatch):
    assert not any(
        missing_extra(name) for name in BLEU_TOKENIZERS if "mecab" not in name
    )
    without_mecab(monkeypatch, "ja_mecab")
    without_mecab(monkeypatch, "ko_mecab")
    assert (missing_extra("ja-mecab"), missing_extra("ko-mecab")) == ("ja", "ko")


def test_another_dictionary_than_that_of_sacrebleu_counts_as_missing(monkeypatch):
    module = importlib.import_module("sacrebleu.tokenizers.tokenizer_ja_mecab")
    small = types.SimpleNamespace(
        dictionary_info=lambda: types.SimpleNamespace(size=1, next=None)
    )
    monkeypatch.setattr(
        module, "MeCab", types.SimpleNamespace(Tagger=lambda arguments: small)
    )
    monkeypatch.setattr(
        module, "ipadic", types.SimpleNamespace(MECAB_ARGS=""), raising=False
    )
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


def test_f1_of_two_labels_is_that_of_the_second():
    """MRPC: of 4 pairs predicted to be paraphrases 3 are, of 5 paraphrases 3 are
    found.
    """
    predicted, references = "1111000", "1110110"
    assert f1(predicted, references, ["0", "1"]) == pytest.approx(
        2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5)
    )
    assert f1(predicted, references, ["1", "0"]) == pytest.approx(
        2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)
    )


def test_f1_of_more_labels_is_their_mean():
    """The example of scikit-learn's documentation of `f1_score`: 0.8, 0 and 0."""
    references, predicted = [0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1]
    assert f1(predicted, references, [0, 1, 2]) == pytest.approx(0.8 / 3)
    assert f1(predicted, references, [0, 1, 2, 3]) == pytest.approx(0.8 / 4), (
        "a label that does not occur scores 0"
    )


def test_f1_without_a_positive_is_0():
    assert f1("000", "000", "01") == 0
    assert f1("000", "011", "01") == 0


def test_matthews_of_two_classes():
    """12 pictures of cats and dogs: 6 cats and 3 dogs are recognized."""
    predicted, references = "cccccc" + "dd" + "c" + "ddd", "cccccccc" + "dddd"
    by_hand = (6 * 3 - 1 * 2) / math.sqrt((6 + 1) * (6 + 2) * (3 + 1) * (3 + 2))
    assert matthews(predicted, references) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(0.478, abs=5e-4)


def test_matthews_of_three_classes():
    """The correlation of indicator vectors, summed over the classes (Gorodkin 2004)."""
    predicted, references = (
        np.array([0, 0, 1, 2, 2, 1, 0]),
        np.array([0, 1, 1, 2, 0, 1, 0]),
    )
    x, y = np.eye(3)[predicted], np.eye(3)[references]
    covariances = [
        ((a - a.mean(axis=0)) * (b - b.mean(axis=0))).sum()
        for a, b in [(x, y), (x, x), (y, y)]
    ]
    by_hand = covariances[0] / math.sqrt(covariances[1] * covariances[2])
    assert 0 < by_hand < 1
    assert matthews(predicted, references) == pytest.approx(by_hand)
    assert matthews(references, references) == pytest.approx(1)


@pytest.mark.parametrize(
    ("predicted", "references"), [("111", "011"), ("011", "111"), ("1", "1")]
)
def test_matthews_is_0_if_one_side_has_one_class(predicted, references):
    assert matthews(predicted, references) == 0


def test_pearson():
    """x - 2 = (-1, 0, 1) and y - 3 = (-1, -1, 2)."""
    assert pearson([1, 2, 3], [2, 2, 5]) == pytest.approx(3 / math.sqrt(2 * 6))
    assert pearson([1, 2, 3], [5, 3, 1]) == pytest.approx(-1)


def test_spearman():
    """Hours of television and IQ of 10 people: the squared differences of ranks sum
    to 194.
    """
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(iq, hours) == pytest.approx(1 - 6 * 194 / (10 * 99))


def test_spearman_gives_ties_the_mean_of_their_ranks():
    """The ranks are (1, 2.5, 2.5, 4) and (2, 2, 2, 4): minus 2.5, (-1.5, 0, 0, 1.5)
    and (-0.5, -0.5, -0.5, 1.5).
    """
    assert spearman([10, 20, 20, 70], [3, 3, 3, 900]) == pytest.approx(
        3 / math.sqrt(4.5 * 3)
    )


@pytest.mark.parametrize("correlation", [pearson, spearman])
def test_correlation_with_a_constant_is_0(correlation):
    constant = [0.1] * 3
    assert np.std(constant) > 0, (
        "the mean must be rounded, so that the deviations are not 0 and all the same"
    )
    assert correlation(constant, range(3)) == correlation(range(3), constant) == 0
    assert correlation(constant, constant) == correlation([2], [3]) == 0


@pytest.mark.parametrize("correlation", [pearson, spearman])
def test_correlation_of_nan_is_nan(correlation):
    assert math.isnan(correlation([1, math.nan, 3], [1, 2, 3]))
    assert math.isnan(correlation([1, 2, 3], [1, 1, math.nan]))


def test_infinities_have_ranks_but_no_deviations():
    assert math.isnan(pearson([1, 2, math.inf], [1, 2, 3]))
    assert math.isnan(pearson([1, 2, 3], [1, 2, math.inf]))
    assert spearman([1, 2, math.inf], [1, 2, 3]) == pytest.approx(1)


def test_correlation_of_columns_is_that_of_their_numbers():
    """A regression head returns (n, 1)."""
    column = np.float32([[1], [2], [3]])
    assert pearson(column, [2, 2, 5]) == pytest.approx(pearson([1, 2, 3], [2, 2, 5]))
    assert spearman(column, [2, 2, 5]) == pytest.approx(spearman([1, 2, 3], [2, 2, 5]))


PAIRED = {
    "f1": lambda p, r: f1(p, r, [0, 1]),
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


@pytest.mark.parametrize("metric", PAIRED)
@pytest.mark.parametrize(
    ("predicted", "references"), [([], []), ([0, 1], [0]), ([], [1])]
)
def test_a_metric_needs_a_reference_for_each_prediction(metric, predicted, references):
    message = (
        f"^{len(predicted)} predictions for {len(references)} references: "
        ".* needs one for each.* compare"
    )
    with pytest.raises(ValueError, match=message):
        PAIRED[metric](predicted, references)


def test_f1_names_what_is_not_a_label():
    with pytest.raises(
        ValueError, match=r"^'2' is not in labels=\('0', '1'\): all .* must be; add it"
    ):
        f1("012", "011", ("0", "1"))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_classification_metrics_are_those_of_scikit_learn(classes):
    sklearn = pytest.importorskip(
        "sklearn.metrics",
        reason="a comparison with scikit-learn: pip install scikit-learn",
    )
    draw, labels = np.random.default_rng(0), range(classes)
    average = "binary" if classes == 2 else "macro"
    for size in (1, 2, 7, 101):
        references = draw.integers(0, classes, size)
        predicted = np.where(
            draw.random(size) < 0.4, references, draw.integers(0, classes, size)
        )
        score = sklearn.f1_score(
            references, predicted, labels=labels, average=average, zero_division=0
        )
        assert f1(predicted, references, labels) == pytest.approx(score)
        if size > 1:  # scikit-learn warns if there is only one class
            assert matthews(predicted, references) == pytest.approx(
                sklearn.matthews_corrcoef(references, predicted)
            )


@pytest.mark.parametrize("distinct", [3, 10**6])
def test_correlations_are_those_of_scipy(distinct):
    stats = pytest.importorskip(
        "scipy.stats", reason="a comparison with SciPy: pip install scipy"
    )
    draw = np.random.default_rng(0)
    for size in (7, 11, 101):
        x = draw.integers(0, distinct, size) / 7
        y = x + draw.integers(0, distinct, size)
        assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


CAPTIONS = ["a dog runs on grass .", "two men sit"]
OF_SEVERAL = [
    ["A dog runs on the grass .", "the black dog runs ."],
    ["Two people sit", "two men are sitting there"],
]


def test_bleu_of_captions_by_hand():
    """n-grams that some reference has, and the references of the closest lengths."""
    scores = caption_scores(CAPTIONS, OF_SEVERAL)
    # 1: all 9 words; 2: a dog, dog runs, runs on, grass . of 5 + two men of
    # 2; 3: a dog runs, dog runs on of 4 + none of 1; 4: a dog runs on of 3 + none of 0
    precisions = [9 / 9, 5 / 7, 2 / 5, 1 / 3]
    brevity = 1  # 7 and 5 are equally close to 6: the shorter one counts
    for n in range(1, 5):
        expected = 100 * brevity * math.prod(precisions[:n]) ** (1 / n)
        assert scores[f"bleu_{n}"] == pytest.approx(expected), n
    several = bleu(CAPTIONS, OF_SEVERAL)
    assert several["bleu_tokenized"] == pytest.approx(scores["bleu_4"])
    assert "nrefs:2" in several["bleu_signature"]


def test_chrf_of_captions_takes_the_best_reference_and_no_case():
    equal = caption_scores(["A DOG"], [["a cat", "a dog"]])
    assert equal["chrf"] == pytest.approx(100)
    worse = caption_scores(["A DOG"], [["a cat", "a log"]])
    assert 0 < worse["chrf"] < 100


def test_scores_of_one_reference_are_those_of_a_list_of_it():
    lists = [[reference] for reference in SENTENCES]
    assert bleu(SENTENCES[::-1], lists) == bleu(SENTENCES[::-1], SENTENCES)
    assert exact_match(["a", "b"], [["b", "a"], ["a", "c"]]) == 0.5
