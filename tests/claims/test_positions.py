"""Scores of a language model at other lengths, and texts without order."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.claims.positions import mean_loss, shuffled, windows


def test_a_shuffled_text_has_the_same_characters():
    text = "Monday, 3 May 2021"
    assert shuffled(text, 0) == shuffled(text, 0) != text
    assert sorted(shuffled(text, 0)) == sorted(text)


def test_windows_start_a_stride_apart():
    expected = [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 8]]
    np.testing.assert_array_equal(windows(np.arange(10), 4, 2), expected)


def logits(params, rows):
    """Return logits that depend on the token and on its place."""
    places = jnp.arange(rows.shape[1])[None, :, None]
    return params[rows] * jnp.cos(places.astype(jnp.float32))


def test_the_loss_is_that_of_the_tokens_at_the_end_of_each_window():
    random = np.random.default_rng(0)
    params = random.normal(size=(7, 7)).astype(np.float32)
    tokens = random.integers(0, 7, 500)
    model = SimpleNamespace(
        apply=lambda variables, rows: logits(variables["params"], rows)
    )
    length, stride = 6, 2
    losses = []
    for start in range(0, len(tokens) - length, stride):
        for place in range(length - stride, length):
            row = params[tokens[start + place]] * np.cos(place)
            target = tokens[start + place + 1]
            losses.append(np.log(np.exp(row).sum()) - row[target])
    found = mean_loss(model, jnp.asarray(params), tokens, length, stride)
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-5)
    assert jax.tree.leaves(found) == [found]
