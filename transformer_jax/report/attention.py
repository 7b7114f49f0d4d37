"""Write attention weights, gradient × input and a logit lens to one HTML file that
needs neither a network nor a server.
"""

import base64
import html
import importlib.resources
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from transformer_jax import files
from transformer_jax.errors import UserError
from transformer_jax.inside import Lens
from transformer_jax.training.evaluation import AttentionMap
from transformer_jax.training.task import Picture


class Sentence(NamedTuple):
    """The parts of the report about one sentence, and its name in the list.

    maps: attention weights and gradient × input.
    lens: the logit lens, or None.
    """

    name: str
    maps: Sequence[AttentionMap]
    lens: Lens | None = None


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


SIDE = 256  # a picture in the file has at most SIDE² pixels


def with_picture(found: AttentionMap, pixels: np.ndarray) -> AttentionMap:
    """Return a map with a picture of its keys, if they lie on a grid without one."""
    if found.picture is None or found.picture.pixels is not None:
        return found
    return found._replace(picture=found.picture._replace(pixels=pixels))


def png(pixels: np.ndarray) -> bytes:
    """Return RGB bytes (height, width, 3) as a PNG file (ISO/IEC 15948)."""
    height, width, _ = pixels.shape
    no_filter = np.zeros((height, 1), np.uint8)
    lines = np.concatenate([no_filter, pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9))]
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in [*chunks, (b"IEND", b"")]:
        checksum = zlib.crc32(kind + content)
        file += struct.pack(">I", len(content)) + kind + content
        file += struct.pack(">I", checksum)
    return file


def _url(pixels: np.ndarray) -> str:
    """Return a picture as a URL that holds it, with at most SIDE² pixels."""
    height, width, _ = pixels.shape
    step = math.ceil(math.sqrt(height * width) / SIDE)
    return (
        "data:image/png;base64,"
        + base64.b64encode(png(pixels[::step, ::step])).decode()
    )


def _rectangle(
    picture: Picture | None, images: dict[str, int]
) -> dict[str, int] | None:
    """Return how keys lie on a picture, with its number in `images`, or -1 for none.

    A new picture is added there.
    """
    if picture is None:
        return None
    number = -1
    if picture.pixels is not None:
        number = images.setdefault(_url(picture.pixels), len(images))
    return {"rows": picture.rows, "columns": picture.columns, "image": number}


def _entropies(weights: np.ndarray) -> list[list[float | None]]:
    """Return the entropy of each head for the file, None if the weights of a query do
    not add up to 1.
    """
    sums = weights.sum(axis=-1)
    if not np.isclose(sums, 1, atol=1e-2).all(where=sums > 0):
        layers, heads = weights.shape[:2]
        return [[None] * heads for _ in range(layers)]
    return np.round(entropy(weights), 3).tolist()


def _content_of(lens: Lens | None) -> dict[str, Any] | None:
    """Return a lens for the file."""
    if lens is None:
        return None
    return lens._asdict() | {"probabilities": np.round(lens.probabilities, 3).tolist()}


def write_report(
    path: epath.PathLike, title: str, sentences: Sequence[Sentence]
) -> int:
    """Write the report and return its size in bytes.

    The report shows each text above the weights of its tokens, and where keys have a
    picture, the weights of each query on it. Weights are rounded to multiples of
    1 / 255, or of 2 / 255 if they have signs, and compressed; entropies are computed
    from the exact weights, of maps in which the weights of a query add up to 1.
    Twenty sentences of 30 tokens with six layers of eight heads take about a megabyte.

    Raises ValueError if the weights do not match their tokens or are not finite, if
    there is nothing to show, or if the file cannot be written.
    """
    if not sentences:
        raise UserError("there is no sentence to show: pass at least one")
    shown = []
    images: dict[str, int] = {}  # URL → its number
    for sentence in sentences:
        if not sentence.maps:
            raise UserError(
                f"there is no attention to show for {sentence.name!r}: "
                "use a model with attention"
            )
        maps = []
        for name, rows, columns, weights, texts, picture, signed in sentence.maps:
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
            shares = (weights + 1) / 2 if signed else weights
            stored = np.round(255 * np.clip(shares, 0, 1)).astype(np.uint8)
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
                    "picture": _rectangle(picture, images),
                    "entropy": _entropies(weights),
                    "signed": signed,
                }
            )
        lens = _content_of(sentence.lens)
        shown.append({"name": sentence.name, "maps": maps, "lens": lens})
    # A script element is read verbatim up to its closing tag, so the data must not
    # contain "<".
    content = {"title": title, "sentences": shown, "images": list(images)}
    data = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")
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
