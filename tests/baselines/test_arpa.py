"""ARPA files, read back by some lines of Python, and by KenLM where it is there."""

import math
import random
import shutil
import subprocess

import numpy as np
import pytest

from transformer_jax.baselines.arpa import arpa_lines
from transformer_jax.baselines.kneser_ney import estimate
from transformer_jax.data.ragged import Ragged
from transformer_jax.errors import UserError

NAMES = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"]
BEGIN, END = 1, 2


def texts(seed, count):
    draw = random.Random(seed)
    words = [draw.choices([4, 5, 6, 7], [9, 5, 2, 1], k=7) for _ in range(count)]
    return Ragged.of([[BEGIN, *row, END] for row in words])


@pytest.fixture(scope="module")
def model():
    predicted = np.array([False, False, *[True] * 6])
    return estimate(texts(1, 60), 3, predicted)


def parsed(lines):
    """Return {n-gram: (log10 P, log10 γ)} and the stated numbers of n-grams."""
    grams = {}
    stated = {}
    for line in lines:
        if line.startswith("ngram "):
            order, count = line.removeprefix("ngram ").split("=")
            stated[int(order)] = int(count)
        elif "\t" in line:
            probability, words, *backoff = line.split("\t")
            backoff = float(backoff[0]) if backoff else 0.0
            grams[tuple(words.split(" "))] = float(probability), backoff
    return grams, stated


def looked_up(grams, words, h):
    """Return log10 P(w | h) as the format defines it."""
    if (*h, words) in grams:
        return grams[(*h, words)][0]
    backoff = grams.get(h, (0.0, 0.0))[1]
    return backoff + looked_up(grams, words, h[1:])


def test_a_reader_of_the_file_finds_the_same_probabilities(model):
    lines = list(arpa_lines(model, NAMES, BEGIN))
    assert lines[0] == "\\data\\"
    assert lines[-1] == "\\end\\"
    grams, stated = parsed(lines)
    for order, count in stated.items():
        assert sum(len(gram) == order for gram in grams) == count
    assert grams[("<s>",)][0] == -99
    assert ("<pad>",) not in grams
    others = Ragged.of([[BEGIN, 4, 7, 3, 7, 7, 4, 5, END]])
    words = [NAMES[i] for i in others[0]]
    expected = [
        looked_up(grams, words[i], tuple(words[max(0, i - 2) : i]))
        for i in range(1, len(words))
    ]
    found = model.log_probabilities(others)[1:] / math.log(10)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_kenlm_scores_sentences_alike(model, tmp_path):
    kenlm = pytest.importorskip("kenlm")
    path = tmp_path / "model.arpa"
    path.write_text("\n".join([*arpa_lines(model, NAMES, BEGIN), ""]))
    theirs = kenlm.LanguageModel(str(path))
    others = texts(2, 40)
    for i in range(len(others)):
        words = [NAMES[j] for j in others[i][1:-1]]
        words[3] = "zebra"  # unknown
        changed = others[i].copy()
        changed[4] = 3
        ours = model.log_probabilities(Ragged.of([changed]))[1:] / math.log(10)
        scores = [score for score, _, _ in theirs.full_scores(" ".join(words))]
        np.testing.assert_allclose(scores, ours, rtol=1e-5, atol=1e-6)


def test_kenlm_estimates_the_same_model(tmp_path):
    if shutil.which("lmplz") is None:
        pytest.skip("KenLM's lmplz is not on PATH")
    rows = texts(5, 300)
    predicted = np.array([False, False, *[True] * 5, False])
    names = [*NAMES[:-1], "unused"]
    rows.values[rows.values == 7] = 4
    lines = [" ".join(names[i] for i in rows[n][1:-1]) for n in range(len(rows))]
    command = ["lmplz", "-o", "3", "-S", "50M", "-T", str(tmp_path)]
    done = subprocess.run(
        [*command, "--discount_fallback"],
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs, _ = parsed(done.stdout.splitlines())
    ours, _ = parsed(arpa_lines(estimate(rows, 3, predicted), names, BEGIN))
    assert ours.keys() == theirs.keys()
    for gram in ours.keys() - {("<s>",)}:  # lmplz writes log10 P = 0 for it
        assert ours[gram] == pytest.approx(theirs[gram], abs=2e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    [(" ", "' '.*no white space"), ("", "''.*not empty"), ("b", "two tokens .* 'b'")],
)
def test_names_that_the_format_cannot_hold(model, name, words):
    names = [*NAMES[:4], name, *NAMES[5:]]
    with pytest.raises(UserError, match=words):
        list(arpa_lines(model, names, BEGIN))
