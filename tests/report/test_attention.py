"""Attention report: the contents of the file, and text that tries to break out of
it.
"""

import base64
import io
import json
import re
import struct
import zlib

import numpy as np
import pytest

from transformer_jax.inside import Lens
from transformer_jax.report.attention import (
    Sentence,
    entropy,
    png,
    with_picture,
    write_report,
)
from transformer_jax.training.evaluation import AttentionMap
from transformer_jax.training.task import Picture

EVIL = '</script><script>alert("DATA & <b>")</script>'


def some_map(layers=2, heads=3, rows=("a", EVIL), columns=("x", "y", "<s>")):
    weights = np.random.default_rng(0).random((layers, heads, len(rows), len(columns)))
    return AttentionMap(
        "cross <attention>",
        rows,
        columns,
        weights / weights.sum(axis=-1, keepdims=True),
    )


def test_file_holds_tokens_weights_and_entropies(tmp_path):
    shown = some_map()
    write_report(tmp_path / "report.html", EVIL, [Sentence(EVIL, [shown])])
    page = (tmp_path / "report.html").read_text()
    assert page.count("</script>") == 2  # one for the data and one for the program
    assert "http" not in page.replace("http-equiv", "")
    data = json.loads(
        re.search(
            r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL
        )[1]
    )
    assert data["title"] == EVIL
    (sentence,) = data["sentences"]
    (found,) = sentence["maps"]
    assert (sentence["name"], found["rows"], found["columns"]) == (
        EVIL,
        ["a", EVIL],
        ["x", "y", "<s>"],
    )
    stored = (
        np.frombuffer(
            zlib.decompress(base64.b64decode(found["weights"])), np.uint8
        ).reshape(2, 3, 2, 3)
        / 255
    )
    np.testing.assert_allclose(stored, shown.weights, atol=0.5 / 255 + 1e-9)
    np.testing.assert_allclose(found["entropy"], entropy(shown.weights), atol=1e-3)


def test_there_is_no_entropy_of_weights_that_are_no_distribution(tmp_path):
    shown = some_map()
    shown = shown._replace(weights=shown.weights / 2)
    write_report(tmp_path / "report.html", "t", [Sentence("s", [shown])])
    page = (tmp_path / "report.html").read_text()
    assert '"entropy": [[null, null, null], [null, null, null]]' in page


def test_the_texts_are_shown_once_each(tmp_path):
    shown = some_map()._replace(
        texts={"source": EVIL, "target": "x", "input": "x", "empty": ""}
    )
    write_report(tmp_path / "report.html", "t", [Sentence("s", [shown])])
    page = (tmp_path / "report.html").read_text()
    data = json.loads(
        re.search(
            r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL
        )[1]
    )
    assert data["sentences"][0]["maps"][0]["texts"] == [
        [EVIL, "source"],
        ["x", "target = input"],
    ]


def content(page):
    text = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text)


def test_weights_with_signs_and_a_lens_are_in_the_file(tmp_path):
    plain = some_map()
    signs = np.array([[1, -1, 1], [-1, 1, -1]])
    signed = plain._replace(weights=plain.weights * signs, signed=True)
    outcomes = [[["a", EVIL], ["b", "c"]]]
    chances = np.array([[[0.75, 0.1234567], [0.5, 0.25]]])
    lens = Lens(["input"], ["x", EVIL], outcomes, chances)
    write_report(tmp_path / "report.html", "t", [Sentence("s", [signed, plain], lens)])
    (sentence,) = content((tmp_path / "report.html").read_text())["sentences"]
    drawn, without_signs = sentence["maps"]
    assert (drawn["signed"], without_signs["signed"]) == (True, False)
    stored = np.frombuffer(
        zlib.decompress(base64.b64decode(drawn["weights"])), np.uint8
    ).reshape(2, 3, 2, 3)
    np.testing.assert_allclose(2 * (stored / 255) - 1, signed.weights, atol=1.01 / 255)
    assert sentence["lens"] == {
        "layers": ["input"],
        "positions": ["x", EVIL],
        "outcomes": outcomes,
        "probabilities": [[[0.75, 0.123], [0.5, 0.25]]],
    }


def test_pictures_of_keys_are_in_the_file_once_each(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3), np.uint8)
    plain = some_map()
    empty = plain._replace(picture=Picture(1, 3))
    drawn = with_picture(empty, pixels)
    assert with_picture(plain, pixels) is plain
    assert with_picture(drawn, 0 * pixels) is drawn
    sentences = [Sentence("a", [plain, empty, drawn]), Sentence("b", [drawn])]
    write_report(tmp_path / "report.html", "t", sentences)
    data = content((tmp_path / "report.html").read_text())
    found = [i["picture"] for sentence in data["sentences"] for i in sentence["maps"]]
    on_image = {"rows": 1, "columns": 3, "image": 0}
    assert found == [None, {"rows": 1, "columns": 3, "image": -1}, on_image, on_image]
    (url,) = data["images"]
    kind, _, encoded = url.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(encoded) == png(pixels)


@pytest.mark.parametrize("shape", [(3, 5, 3), (1, 1, 3)])
def test_a_picture_is_a_png_file(shape):
    images = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    image = images.open(io.BytesIO(png(pixels)))
    assert (image.format, image.mode) == ("PNG", "RGB")
    np.testing.assert_array_equal(np.asarray(image), pixels)


def test_a_large_picture_is_scaled_down(tmp_path):
    drawn = some_map()._replace(
        picture=Picture(1, 3, np.zeros((900, 300, 3), np.uint8))
    )
    write_report(tmp_path / "report.html", "t", [Sentence("a", [drawn])])
    (url,) = content((tmp_path / "report.html").read_text())["images"]
    size = base64.b64decode(url.partition(",")[2])[16:24]
    assert struct.unpack(">II", size) == (100, 300)


def test_entropy():
    weights = np.array(
        [
            [
                [[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]],
                [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]],
            ]
        ]
    )
    np.testing.assert_allclose(entropy(weights), [[1.0, 1.0]])


def test_what_cannot_be_drawn(tmp_path):
    wrong = some_map()._replace(queries=["a"])
    with pytest.raises(
        ValueError,
        match=r"weights of shape \(2, 3, 2, 3\) do not match 1 rows and 3 columns",
    ):
        write_report(tmp_path / "report.html", "t", [Sentence("s", [wrong])])
    with pytest.raises(ValueError, match="no sentence to show"):
        write_report(tmp_path / "report.html", "t", [])
    with pytest.raises(ValueError, match="no attention to show for 'second'"):
        write_report(
            tmp_path / "report.html",
            "t",
            [Sentence("first", [some_map()]), Sentence("second", [])],
        )
    with pytest.raises(
        ValueError, match=r"of 's' has shape \(2, 3, 0, 3\): leave out empty maps"
    ):
        write_report(
            tmp_path / "report.html", "t", [Sentence("s", [some_map(rows=())])]
        )
    broken = some_map()
    broken.weights[1, 2, 0, 0] = np.nan
    with pytest.raises(ValueError, match="of 's': some weights are not finite"):
        write_report(tmp_path / "report.html", "t", [Sentence("s", [broken])])
    assert not (tmp_path / "report.html").exists()


def test_an_ordinary_report_is_below_2_megabytes(tmp_path):
    """Twenty sentences of 30 tokens, six layers of eight heads, and weights as
    peaked as those of a trained model.
    """
    draw, tokens = np.random.default_rng(0), [f"token{i}" for i in range(30)]

    def maps():
        weights = np.exp(4 * draw.normal(size=(3, 6, 8, 30, 30)))
        weights /= weights.sum(axis=-1, keepdims=True)
        return [
            AttentionMap(name, tokens, tokens, w)
            for name, w in zip("abc", weights, strict=True)
        ]

    size = write_report(
        tmp_path / "report.html", "t", [Sentence(str(i), maps()) for i in range(20)]
    )
    assert size == (tmp_path / "report.html").stat().st_size < 2_000_000
