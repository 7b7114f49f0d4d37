"""The scores of written texts that `evaluation.text_scores` adds to those of a task."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformer_jax import text_scores
from transformer_jax.data.batching import Batches
from transformer_jax.data.columns import Sourced, WithSources
from transformer_jax.data.source_texts import source_text
from transformer_jax.data.text import ParallelData
from transformer_jax.errors import UserError

# a value of evaluation.text_scores → the scores that it adds
CHOSEN_SCORES = {"rouge": tuple(text_scores.ROUGE), "gleu": ("gleu",)}
# each of these scores → the value that adds it
CHOSEN_BY = {score: name for name in CHOSEN_SCORES for score in CHOSEN_SCORES[name]}


def rules_of(scores: Sequence[str]) -> Iterator[str]:
    """Yield the rule and the remedy for each value of evaluation.text_scores that is
    unknown or cannot be computed here.
    """
    for name in scores:
        if name not in CHOSEN_SCORES:
            known = " and ".join(map(repr, CHOSEN_SCORES))
            yield f"may hold {known}, but not {name!r}; () adds no score"
    if "rouge" in scores and not text_scores.has_rouge():
        yield f"'rouge' {text_scores.INSTALL_ROUGE}, or leave it out"


def with_sources(
    batches: Batches, scores: Sequence[str], data: ParallelData
) -> Batches:
    """Return the batches with the source beside the references of each example, if one
    of `scores` compares with it and there are references.
    """
    if "gleu" not in scores or not len(batches.references):
        return batches
    sources = [source_text(record, data) for record in batches.records]
    return batches._replace(references=WithSources(batches.references, sources))


def chosen_scores(
    scores: Sequence[str],
    lines: Sequence[str],
    of_lines: Sequence[Sequence[str]],
    entries: Sequence[Any],
) -> dict[str, float]:
    """Return the values of `scores`, see `text_scores`.

    Args:
        scores: keys of `CHOSEN_SCORES`.
        lines: the outputs.
        of_lines: the references of each output.
        entries: the entries of `Batches.references` that `of_lines` are from.

    Raises:
        ValueError: a score needs sources, and `entries` have none, see `with_sources`.
    """
    values: dict[str, float] = {}
    if "rouge" in scores:
        values |= text_scores.rouge(lines, of_lines)
    if "gleu" in scores:
        sources = [entry.source for entry in entries if isinstance(entry, Sourced)]
        if len(sources) < len(entries):
            raise UserError(
                f"{len(sources)} of {len(entries)} references have a source: GLEU "
                "needs all; score references of Task.batches, or leave 'gleu' out of "
                "evaluation.text_scores"
            )
        values |= text_scores.gleu(lines, of_lines, sources)
    return values
