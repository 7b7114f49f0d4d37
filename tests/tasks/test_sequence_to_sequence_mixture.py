"""One model for several data sets, trained, continued, scored and used."""

import jax
import numpy as np
import pytest

import transformer_jax
from helpers.corpus import put_before, write_corpus
from helpers.runs import run


@pytest.fixture
def mixture(tiny, tmp_path):
    """A config of two data sets, of 60 and 20 pairs."""
    folder = tmp_path / "mixture"
    for name, pairs in (("first", 60), ("second", 20)):
        write_corpus(folder / name, pairs, languages=("inputs", "targets"))
        put_before(f"{name[0]} ", folder / name, "inputs")
    tiny.data.update(
        directory=str(folder),
        mixture=("first=3", "second=1"),
        prefixes=("f ", "s "),
        source_language="inputs",
        target_language="targets",
    )
    return tiny


def test_a_model_of_several_data_sets_is_scored_and_used_in_each(mixture, tmp_path):
    run(mixture, tmp_path / "run")
    predictor = transformer_jax.load(str(tmp_path / "run"))
    scores = {
        split: predictor.evaluate(split)
        for split in ("test", "test:first", "test[:3]:second")
    }
    assert [score["examples"] for score in scores.values()] == [14, 7, 3]
    assert len({score["loss"] for score in scores.values()}) == 3
    with pytest.raises(ValueError, match="names the data set third, which"):
        predictor.evaluate("test:third")
    assert len(predictor.predict(["f ik", "", "s ik"])) == 3
    with pytest.raises(ValueError, match="line 2 is 'ik': it must begin with the pref"):
        predictor.predict(["f ik", "ik"])


@pytest.mark.usefixtures("without_search")
def test_a_mixture_continues_where_it_stopped(mixture, tmp_path):
    mixture.optimizer.schedule = "constant"
    whole = run(mixture, tmp_path / "whole", training__steps=6)
    run(mixture, tmp_path / "parts", training__steps=2)
    parts = run(mixture, tmp_path / "parts", training__steps=6)
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)
