"""One model for several directions of translation, trained and used."""

import numpy as np
import pytest

import transformer_jax
from helpers.runs import run


def test_a_model_of_several_directions_is_scored_and_used_in_each(
    tiny, tmp_path, corpus
):
    tiny.data.directions = ("en-de", "de-en", "en-fr")
    tiny.data.update(source_language="source", target_language="target")
    run(tiny, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))

    lines = len((corpus / "test.de").read_text().splitlines())
    scores = {
        split: predictor.evaluate(split)
        for split in ("test", "test:en-de", "test:de-en", "test:en-fr", "test:de-fr")
    }
    assert [score["examples"] for score in scores.values()] == [3 * lines, *[lines] * 4]
    losses = [score["loss"] for score in scores.values()]
    assert len(set(losses)) == 5
    # the mean over all tokens, and the mean of three means
    np.testing.assert_allclose(losses[0], np.mean(losses[1:4]), rtol=0.05)

    texts = predictor.predict(["<2de> eka", "", "<2fr> eka"])
    assert texts[1] == ""
    assert len(texts) == 3
    with pytest.raises(ValueError, match="line 2 is 'eka': it must begin with the"):
        predictor.predict(["<2de> eka", "eka"])
