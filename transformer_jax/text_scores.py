"""Scores for text to text: ROUGE of summaries and GLEU of grammar correction."""

import importlib.util
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.metrics import check_pairs

# our name → that of the package rouge-score
ROUGE = {
    "rouge_1": "rouge1",
    "rouge_2": "rouge2",
    "rouge_l": "rougeL",
    "rouge_lsum": "rougeLsum",
}
BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+")
INSTALL_ROUGE = (
    "needs the package rouge-score: pip install -c constraints.txt -e '.[rouge]' "
    "in the folder of transformer_jax"
)
GLEU_ORDER = 4  # the longest n-grams
GLEU_DRAWS = 500
# Draw i has the seed 101 · i, as in the program of the authors of GLEU.
GLEU_SEED_STEP = 101

Ngrams = Counter[tuple[str, ...]]


def has_rouge() -> bool:
    """Return True if the package that computes ROUGE is installed."""
    return importlib.util.find_spec("rouge_score") is not None


def rouge(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return ROUGE of summaries (Lin 2004), from 0 to 100, as computed by the package
    rouge-score.

    "rouge_1" and "rouge_2" are F1 of unigrams and bigrams, "rouge_l" that of the
    longest common subsequence of the whole texts, which is ROUGE-L on sentence level.
    "rouge_lsum" is ROUGE-L on summary level: for each sentence of the reference, the
    union of its longest common subsequences with the sentences of the summary counts. A
    sentence ends with ".", "!" or "?" before a space.

    Words are lower-cased and stemmed (Porter 1980), and consist of the letters a to z
    and digits. All other characters separate words. Each score is the mean over the
    texts. If a text has several references, the one with the highest score counts, for
    each of the four scores.

    Raises:
        ValueError: The package is missing, the numbers of hypotheses and references
            differ or are 0, or a hypothesis has no reference.
    """
    _check(hypotheses, references)
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError as error:
        raise UserError(f"ROUGE {INSTALL_ROUGE}") from error
    tokenizer = DefaultTokenizer(use_stemmer=True)
    scorer = RougeScorer(list(ROUGE.values()), tokenizer=tokenizer)
    totals = dict.fromkeys(ROUGE, 0.0)
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        # to the package, each line is a sentence; a break is a space in other scores
        summary, *of_reference = (
            BETWEEN_SENTENCES.sub("\n", text) for text in (hypothesis, *texts)
        )
        best = scorer.score_multi(of_reference, summary)
        for name, theirs in ROUGE.items():
            totals[name] += best[theirs].fmeasure
    return {name: 100 * total / len(hypotheses) for name, total in totals.items()}


def gleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    sources: Sequence[str],
) -> dict[str, float]:
    """Return GLEU of corrected sentences, from 0 to 100 (Napoles et al. 2015), without
    the weight of the first version (Napoles et al. 2016, "GLEU without tuning").

    It is BLEU with up to 4-grams, except that an n-gram of the hypothesis counts
    against it if it is in the source and not in the reference. With the n-grams h of a
    hypothesis, r of its reference and s of its source, and all sums over the sentences,

        p_n = Σ max(0, |h ∩ r| - |h ∩ (s without r)|) / Σ |h|
        GLEU = min(1, exp(1 - Σ |r| / Σ |h|)) · (p_1 p_2 p_3 p_4)^¼

    where |r| and |h| in the second line are numbers of tokens. Tokens are separated by
    spaces, and case matters.

    With several references, the score is the mean over 500 draws of one reference for
    each sentence. The draws are the same in every call, and those of the authors'
    program.

    Differs: as in that program, "s without r" lacks all n-grams that occur in r, even
    if the source has more of one; and a sentence counts at least 0.

    Raises:
        ValueError: The numbers of hypotheses, references and sources differ or are 0,
            or a hypothesis has no reference.
    """
    _check(hypotheses, references)
    if len(sources) != len(hypotheses):
        raise UserError(
            f"{len(sources)} sources for {len(hypotheses)} predictions: "
            "GLEU needs one for each; compare the lists before the call"
        )
    sizes = [len(texts) for texts in references]
    rows = []
    for hypothesis, texts, source in zip(hypotheses, references, sources, strict=True):
        written = _ngrams(hypothesis)
        given = _ngrams(source)
        rows += [_statistics(written, _ngrams(text), given) for text in texts]
    statistics = np.array(rows)
    firsts = np.cumsum([0, *sizes[:-1]])
    scores = [
        _gleu_of_sums(statistics[firsts + drawn].sum(axis=0)) for drawn in _draws(sizes)
    ]
    return {"gleu": 100 * sum(scores) / len(scores)}


def _check(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raise ValueError unless each hypothesis has a list of references."""
    check_pairs(hypotheses, references)
    for number, texts in enumerate(references, 1):
        if isinstance(texts, str) or not texts:
            raise UserError(
                f"text {number} has the references {texts!r}: "
                "it needs a list of at least one text"
            )


def _ngrams(text: str) -> list[Ngrams]:
    """Return the n-grams of a text for n = 1 to 4."""
    words = text.split()
    return [
        Counter(zip(*(words[start:] for start in range(n)), strict=False))
        for n in range(1, GLEU_ORDER + 1)
    ]


def _statistics(
    hypothesis: Sequence[Ngrams], reference: Sequence[Ngrams], source: Sequence[Ngrams]
) -> list[int]:
    """Return the numbers of tokens of hypothesis and reference, and for each n the
    numerator and the denominator of p_n, for one sentence.
    """
    numbers = [hypothesis[0].total(), reference[0].total()]
    for h, r, s in zip(hypothesis, reference, source, strict=True):
        unchanged = Counter({ngram: s[ngram] for ngram in s.keys() - r.keys()})
        numbers.append(max(0, (h & r).total() - (h & unchanged).total()))
        numbers.append(h.total())
    return numbers


def _gleu_of_sums(sums: np.ndarray) -> float:
    """Return GLEU from the sums (10,) of `_statistics`, from 0 to 1: 0 if one is 0."""
    if not sums.all():
        return 0.0
    of_hypotheses, of_references = sums[:2]
    precisions = sums[2::2] / sums[3::2]
    brevity = min(0.0, 1 - of_references / of_hypotheses)
    return math.exp(brevity + np.log(precisions).mean())


def _draws(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield one number below each of `sizes`, 500 times, or once if all are 1."""
    count = GLEU_DRAWS if max(sizes) > 1 else 1
    for number in range(count):
        uniform = random.Random(GLEU_SEED_STEP * number).random
        yield [int(uniform() * size) for size in sizes]
