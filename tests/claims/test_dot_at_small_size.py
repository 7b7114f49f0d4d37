"""Dot attention with any scale and any decoder."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer_jax.claims.dot_at_small_size import AnyDecoderConfig, over_root
from transformer_jax.models import RecurrentSeq2Seq
from transformer_jax.models.alignment import ALIGNMENTS

SMALL = {
    "source_vocab_size": 11,
    "target_vocab_size": 13,
    "embedding_dim": 4,
    "encoder_dim": 6,
    "d_model": 6,
    "attention_dim": 5,
    "bidirectional": True,
}
IDS = np.array([[1, 2, 3]])


def test_scores_are_divided_by_the_root_of_the_width():
    draw = np.random.default_rng(0)
    s, h = (draw.normal(size=(2, n, 6)).astype(np.float32) for n in (3, 4))
    dot = ALIGNMENTS["dot"]
    with nn.intercept_methods(over_root):
        found = dot(6, 6).apply({}, s, h, method=dot.scores)
    expected = np.einsum("btd,bsd->bts", s, h) / np.sqrt(6)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_the_decoder_does_not_depend_on_the_score(score):
    widths = {}
    for reader in ("luong", "bahdanau"):
        config = AnyDecoderConfig(**SMALL, attention=score, reader=reader)
        assert not list(config.problems())
        init = RecurrentSeq2Seq(config).init
        shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), IDS, IDS))["params"]
        assert ("combine" in shapes["decoder"]) == (reader == "luong")
        widths[reader] = config.output_dim
    assert widths == {"luong": 6, "bahdanau": 6 + 6 + 4}
