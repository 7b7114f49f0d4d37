"""Metrics that compare predictions with references."""

import math
from collections.abc import Mapping, Sequence

import sacrebleu

# The tokenizers of sacreBLEU that download nothing, and the extras of this package that two of them need.
BLEU_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
EXTRAS = {"ja-mecab": "ja", "ko-mecab": "ko"}


def bleu(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "13a") -> dict[str, float | str]:
    """Return corpus BLEU (Papineni et al. 2002), from 0 to 100, as computed by sacreBLEU (Post 2018).

    The result has three keys. "bleu" uses sacreBLEU's `tokenizer`, one of `BLEU_TOKENIZERS`, and is meant for raw text;
    "bleu_signature" is its sacreBLEU signature. "bleu_tokenized" is lower-cased and uses the tokens as given, separated
    by spaces; papers report this score for text that was tokenized beforehand.
    """
    standard = sacrebleu.BLEU(tokenize=tokenizer, force=True)  # `force`: no warning that the text looks tokenized
    as_given = sacrebleu.BLEU(lowercase=True, tokenize="none", force=True)
    return {
        "bleu": standard.corpus_score(hypotheses, [references]).score,
        "bleu_signature": str(standard.get_signature()),
        "bleu_tokenized": as_given.corpus_score(hypotheses, [references]).score,
    }


def missing_extra(tokenizer: str) -> str:
    """Return the extra of this package that `tokenizer` needs and that is not installed, or ""."""
    if tokenizer not in EXTRAS:
        return ""
    try:
        sacrebleu.BLEU(tokenize=tokenizer)
    except (RuntimeError, AssertionError):  # without MeCab, or with another dictionary than sacreBLEU's
        return EXTRAS[tokenizer]
    return ""


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of hypotheses that are equal to their references, from 0 to 1.

    Raises:
        ValueError: The numbers of hypotheses and references differ.
    """
    return sum(h == r for h, r in zip(hypotheses, references, strict=True)) / len(references)


def loss_and_perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """Return the loss in nats and its exponential, the perplexity, or an empty dict if `means` has no "loss"."""
    if "loss" not in means:
        return {}
    return {"loss": means["loss"], "perplexity": math.exp(min(means["loss"], 700))}
