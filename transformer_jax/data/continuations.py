"""Texts that continue others: what ids add to a prompt, and ids of a text after its
context.

A tokenizer is given the whole, since the whole is not the sum of its parts. It may put
a space before a text and leave it out when it decodes, join marks to the words before
them, and have pieces that span the end of one text and the start of the next.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.data.ragged import Ragged
from transformer_jax.data.tokenizers import Tokenizer

CHUNK = 10_000  # texts encoded at a time


class Prompt:
    """The ids of a prompt, and the text that further ids add to it."""

    def __init__(self, tokenizer: Tokenizer, ids: Iterable[int]):
        special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in ids if i not in special]
        self._text = tokenizer.decode(self._ids)

    def continuation(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` after the prompt, up to the first end id.

        If they change how the end of the prompt is written, the text starts there.
        """
        whole = self._tokenizer.decode([*self._ids, *ids])
        if whole.startswith(self._text):
            return whole[len(self._text) :]
        for i, (old, new) in enumerate(zip(self._text, whole, strict=False)):
            if old != new:
                return whole[i:]
        return ""


class Pairs(NamedTuple):
    """The ids of each context and text together, and (n,) the position of the first id
    of the text.
    """

    ids: Ragged
    first: np.ndarray


def encode_pairs(
    tokenizer: Tokenizer, contexts: Sequence[str], texts: Sequence[str]
) -> Pairs:
    """Encode each context and the text after it as one.

    A token that spans the border between them belongs to the context, with two
    exceptions: if only white space of the context is in it, or if it is all that the
    text has, it belongs to the text.
    """
    parts = [
        _encode_pairs(tokenizer, contexts[i : i + CHUNK], texts[i : i + CHUNK])
        for i in range(0, len(texts), CHUNK)
    ]
    ids = Ragged.join([part.ids for part in parts])
    return Pairs(ids, np.concatenate([part.first for part in parts]))


def _encode_pairs(
    tokenizer: Tokenizer, contexts: Sequence[str], texts: Sequence[str]
) -> Pairs:
    wholes = [context + text for context, text in zip(contexts, texts, strict=True)]
    ids, starts, ends = tokenizer.spans(wholes)
    sizes = np.fromiter(map(len, contexts), np.int64, len(contexts))
    first = np.zeros(len(texts), np.int64)
    rows = np.repeat(np.arange(len(texts)), ids.lengths)
    starts_before = starts.values < sizes[rows]
    ends_after = ends.values > sizes[rows]
    np.add.at(first, rows, starts_before)
    for token in np.flatnonzero(starts_before & ends_after).tolist():
        row = rows[token]
        part_of_context = wholes[row][starts.values[token] : sizes[row]]
        if part_of_context.isspace() or first[row] == ids.lengths[row]:
            first[row] = min(first[row], token - ids.offsets[row])
    return Pairs(ids, first)
