"""Write attention weights to one HTML file that needs neither a network nor a
server.
"""

import base64
import html
import importlib.resources
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from transformer_jax import files
from transformer_jax.errors import UserError
from transformer_jax.training.evaluation import AttentionMap


class Sentence(NamedTuple):
    """The attention maps of one sentence, and the name under which the report lists
    them.
    """

    name: str
    maps: Sequence[AttentionMap]


def entropy(weights: np.ndarray) -> np.ndarray:
    """Return the entropy -Σ w log₂ w in bits, averaged over queries: (L, N, T, S) →
    (L, N).
    """
    weights = np.asarray(weights, np.float64)
    return (
        -(weights * np.log2(np.where(weights > 0, weights, 1)))
        .sum(axis=-1)
        .mean(axis=-1)
    )


def _by_text(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Group the names of equal texts: {name: text} → {text: names}. Empty texts are
    left out.
    """
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        if text:
            names.setdefault(text, []).append(name)
    return names


def write_report(
    path: epath.PathLike, title: str, sentences: Sequence[Sentence]
) -> int:
    """Write the report and return its size in bytes.

    The report shows each text above the weights of its tokens. Weights are rounded to
    multiples of 1 / 255 and compressed; entropies are computed from the exact weights.
    Twenty sentences of 30 tokens with six layers of eight heads take about a megabyte.

    Raises ValueError if the weights do not match their tokens or are not finite, if
    there is nothing to show, or if the file cannot be written.
    """
    if not sentences:
        raise UserError("there is no sentence to show: pass at least one")
    shown = []
    for sentence in sentences:
        if not sentence.maps:
            raise UserError(
                f"there is no attention to show for {sentence.name!r}: "
                "use a model with attention"
            )
        maps = []
        for name, rows, columns, weights, texts in sentence.maps:
            if not weights.size:
                raise UserError(
                    f"{name} of {sentence.name!r} has shape {weights.shape}: "
                    "leave out empty maps"
                )
            if weights.shape[2:] != (len(rows), len(columns)):
                raise UserError(
                    f"{name}: weights of shape {weights.shape} "
                    f"do not match {len(rows)} rows and {len(columns)} columns"
                )
            if not np.isfinite(weights).all():
                raise UserError(
                    f"{name} of {sentence.name!r}: some weights are not finite; "
                    "use another checkpoint"
                )
            stored = np.round(255 * np.clip(weights, 0, 1)).astype(np.uint8)
            maps.append(
                {
                    "name": name,
                    "texts": [
                        [text, " = ".join(names)]
                        for text, names in _by_text(texts).items()
                    ],
                    "rows": list(rows),
                    "columns": list(columns),
                    "heads": weights.shape[1],
                    "weights": (
                        base64.b64encode(zlib.compress(stored.tobytes(), 9)).decode()
                    ),
                    "entropy": np.round(entropy(weights), 3).tolist(),
                }
            )
        shown.append({"name": sentence.name, "maps": maps})
    # A script element is read verbatim up to its closing tag, so the data must not
    # contain "<".
    data = json.dumps({"title": title, "sentences": shown}, ensure_ascii=False).replace(
        "<", "\\u003c"
    )
    template = (
        importlib.resources.files(__package__)
        .joinpath("attention.html")
        .read_text(encoding="utf-8")
    )
    page = template.replace("DATA", data).replace(
        "<title>Attention</title>", f"<title>{html.escape(title)}</title>"
    )
    data_bytes = page.encode()
    files.write(path, data_bytes)
    return len(data_bytes)
