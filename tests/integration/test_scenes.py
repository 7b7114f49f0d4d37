"""Attention looks at what it names: a model of scenes, trained whole."""

import numpy as np
import pytest

import transformer_jax
from helpers.runs import get_config, run
from transformer_jax.data.corpora import scenes
from transformer_jax.data.tables import tsv_file

pytest.importorskip("sklearn", reason="scikit-learn: pip install -e '.[digits]'")
pytest.importorskip("PIL", reason="Pillow: pip install -e '.[images]'")

DIGITS = {name.split()[1] for name in scenes.NAMES}


def looks(predictor, directory, split, count):
    """Return, for each digit word of the first captions of a split, whether the largest
    weight of attention lies on the digit, and the share of the weight that does.

    The model reads the right caption. Weights are means over layers and heads.
    """
    columns = ("caption", "places")
    table = tsv_file(directory, split, columns)
    captions, places = (list(table.column(name)[:count]) for name in columns)
    source = predictor.task.corpus.open(split).column("image")
    records = [
        {"image": source[i], "caption": caption} for i, caption in enumerate(captions)
    ]
    found = []
    for maps, of_digits in zip(predictor.attention(records), places, strict=True):
        across = next(
            found for found in maps if found.name in ("alignment", "cross-attention")
        )
        words = [word.strip(",") for word in across.queries]
        digits = [i for i, word in enumerate(words) if word in DIGITS]
        for query, place in zip(digits, of_digits.split(), strict=True):
            rectangle = (across.picture.rows, across.picture.columns)
            weights = across.weights.mean(axis=(0, 1))[query].reshape(rectangle)
            height, width = np.array(rectangle) // (scenes.ROWS, scenes.COLUMNS)
            row, column = map(int, place.split(","))
            on_digit = weights[
                row * height : (row + 1) * height, column * width : (column + 1) * width
            ]
            found.append((on_digit.max() == weights.max(), on_digit.sum()))
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["additive", "transformer"])
def test_attention_lies_on_the_digit_that_is_named(attention, tmp_path):
    config = get_config("scenes", attention)
    config.data.directory = str(tmp_path / "data")
    scenes.write(tmp_path / "data")
    run(config, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    assert predictor.evaluate()["exact_match"] >= 0.95
    largest, _ = looks(predictor, tmp_path / "data", "test", 200).mean(axis=0)
    assert largest >= 0.9
