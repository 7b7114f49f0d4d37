"""The length of translations."""

from transformer_jax.claims.beam import length_ratio


def test_length_ratio():
    assert length_ratio(["a b", ""], ["a b c", "d"]) == 0.5
