"""Score predictions against references."""

import math
from collections.abc import Mapping, Sequence

import sacrebleu


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
    """Return corpus BLEU (Papineni et al. 2002), 0–100, by sacreBLEU (Post 2018), in two readings.

    `bleu` with `bleu_signature`: sacreBLEU's own tokenization, for raw text. `bleu_tokenized`: lower-cased, on the
    tokens as given, which is what papers report on text that was tokenized beforehand.
    """
    standard = sacrebleu.BLEU(force=True)  # no warning on text that is tokenized: the reader knows which it is
    as_given = sacrebleu.BLEU(lowercase=True, tokenize="none", force=True)
    return {
        "bleu": standard.corpus_score(hypotheses, [references]).score,
        "bleu_signature": str(standard.get_signature()),
        "bleu_tokenized": as_given.corpus_score(hypotheses, [references]).score,
    }


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of hypotheses equal to their reference, 0–1."""
    return sum(h == r for h, r in zip(hypotheses, references, strict=True)) / len(references)


def loss_and_perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """Return the loss in nats and its exponential, or nothing if there is no loss."""
    if "loss" not in means:
        return {}
    return {"loss": means["loss"], "perplexity": math.exp(min(means["loss"], 700))}
