"""Write n-gram models in the ARPA format, which KenLM, SRILM and speech recognizers
read.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_jax.baselines.kneser_ney import Level, NgramModel
from transformer_jax.errors import UserError

NEVER = -99.0  # log10 of the probability of a token that is never predicted


def arpa_lines(model: NgramModel, tokens: Sequence[str], begin: int) -> Iterator[str]:
    r"""Yield the lines of an ARPA file.

    A line is log10 P(w | h), the n-gram h w, and if n is not the order of the model,
    log10 γ(h w), separated by tabs. Tokens that are never predicted are left out,
    except `begin`.

    Args:
        model: the model.
        tokens: (V,) the name of each id. In KenLM, the tokens that begin and end a
            sentence are called "<s>" and "</s>", and the unknown one "<unk>".
        begin: id of the token that begins a text.

    Raises:
        UserError: two tokens have the same name, or a name has white space or is empty.
    """
    written = np.isfinite(model.levels[0].log_probability)
    written[begin] = True
    _check_names([tokens[i] for i in np.flatnonzero(written).tolist()])
    yield "\\data\\"
    for k, level in enumerate(model.levels, 1):
        count = int(written.sum()) if k == 1 else len(level.keys)
        yield f"ngram {k}={count}"
    names: Sequence[str] = [""]
    for k, level in enumerate(model.levels, 1):
        names = _names(level, names, tokens)
        yield ""
        yield f"\\{k}-grams:"
        rows = np.flatnonzero(written).tolist() if k == 1 else range(len(names))
        probabilities = _log10(level.log_probability)
        backoffs = _log10(level.log_backoff)
        for row in rows:
            line = f"{probabilities[row]:.9g}\t{names[row]}"
            yield line if k == model.order else f"{line}\t{backoffs[row]:.9g}"
    yield ""
    yield "\\end\\"


def _log10(values: np.ndarray) -> list[float]:
    return np.maximum(values / math.log(10), NEVER).tolist()


def _names(
    level: Level, prefixes: Sequence[str], tokens: Sequence[str]
) -> Sequence[str]:
    """Return the k-grams of a level as text, given those of order k - 1."""
    contexts, last = np.divmod(level.keys, len(tokens))
    pairs = zip(contexts.tolist(), last.tolist(), strict=True)
    return [f"{prefixes[row]} {tokens[token]}".lstrip() for row, token in pairs]


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name.split() != [name]:
            raise UserError(
                f"the token {name!r} cannot be written to an ARPA file: "
                "a name has no white space and is not empty; use another tokenizer"
            )
    for one, other in itertools.pairwise(sorted(names)):
        if one == other:
            raise UserError(
                f"two tokens are called {one!r}: an ARPA file needs a name for each; "
                "use another tokenizer"
            )
