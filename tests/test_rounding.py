"""Parameters with weights in 8 bits: which they are, and what a run predicts with
them.
"""

import jax
import numpy as np
import pytest
from flax import traverse_util

import transformer_jax
from helpers.runs import parameters, small
from transformer_jax import experiment
from transformer_jax.config import ConfigError, make_task, parse
from transformer_jax.models.kernels.int8 import Int8
from transformer_jax.rounding import summed_axes, to_int8


@pytest.mark.parametrize(
    ("task", "architecture", "named"),
    [
        (
            "sequence_to_sequence",
            "transformer",
            {
                "target_embedding/table": (-1,),
                "encoder/layers/self_attention/query/kernel": (-3,),
                "decoder/layers/cross_attention/output/kernel": (-3, -2),
                "decoder/layers/feed_forward/outer/kernel": (-2,),
            },
        ),
        ("language_modeling", "gpt", {"embedding/table": (-1,)}),
    ],
)
def test_the_weights_of_products(task, architecture, named, corpus):
    made = make_task(parse(small(task, corpus, architecture)), None)
    axes = dict(summed_axes(made.init))
    assert {name: axes[name] for name in named} == named
    rounded = to_int8(parameters(made), tuple(axes.items()))
    kept = traverse_util.flatten_dict(rounded, sep="/")
    for name, value in kept.items():
        assert isinstance(value, Int8) == (name in axes), name
        is_matrix = name.endswith(("/kernel", "/table"))
        assert is_matrix or name not in axes, name


def test_weights_are_found_again_after_the_model_was_traced(corpus):
    task = make_task(parse(small("language_modeling", corpus)), None)
    jax.eval_shape(task.init, jax.random.key(0))
    assert summed_axes(task.init)


def test_a_run_predicts_with_rounded_weights(corpus, tmp_path):
    config = small("sequence_to_sequence", corpus)
    experiment.run(config, tmp_path / "run")
    scores = {}
    for weights in ("float32", "int8"):
        found = transformer_jax.load(
            str(tmp_path / "run"), {"evaluation.weights": weights}
        )
        texts = found.predict(["ak ek", "om"])
        assert len(texts) == 2
        scores[weights] = found.evaluate("val")["loss"]
    assert scores["int8"] != scores["float32"]
    np.testing.assert_allclose(scores["int8"], scores["float32"], rtol=0.01)


def test_other_weights_are_refused(corpus):
    config = small("language_modeling", corpus)
    config.evaluation.weights = "int4"
    with pytest.raises(ConfigError, match=r"weights.*float32, int8"):
        parse(config)
