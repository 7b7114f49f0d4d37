"""The end of a text that is still being written."""

from collections.abc import Sequence

import numpy as np

# what decoders make of the first bytes of a character
PART = "\N{REPLACEMENT CHARACTER}"


def cut_at(text: str, stop: Sequence[str]) -> str | None:
    """Return the text before the first occurrence of a stop string, or None if there
    is none.
    """
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else None


def before_end(tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Return the tokens (T,) before the first of the ids `ends`."""
    at_end = np.flatnonzero(np.isin(tokens, np.array(ends, np.int64)))
    return tokens[: at_end[0]] if len(at_end) else tokens


def certain(text: str, stop: Sequence[str]) -> str:
    """Return the part of an unfinished text that stays, whatever follows.

    What may still change is a character at the end whose bytes are incomplete, and the
    beginning of a stop string.
    """
    text = text.rstrip(PART)
    begun = [
        n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])
    ]
    return text[: len(text) - max(begun, default=0)]
