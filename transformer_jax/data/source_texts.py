"""The text of a source, without what stands before it for the model alone."""

from transformer_jax.data.languages import divided
from transformer_jax.data.text import ParallelData


def source_text(record: str, data: ParallelData) -> str:
    """Return the text of a source that `data` reads, e.g. "He go ." of
    "<2en> He go ." or of "correct grammar: He go .".

    Scores that compare an output with its source take this text.
    """
    _, text = divided(record, data.marks)
    # the longest first, because one may be the beginning of another
    for prefix in sorted(data.prefixes, key=len, reverse=True):
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return text
