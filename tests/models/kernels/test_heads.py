"""Arrays of heads as kernels want them."""

import numpy as np

from transformer_jax.models.kernels.heads import heads_first, repeat_heads

B, T, K, H = 2, 5, 3, 7
X = np.float32(np.random.default_rng(0).normal(size=(B, T, K, H)))


def test_adjacent_query_heads_share_a_head_of_keys():
    repeated = repeat_heads(X, 6)
    for n in range(6):
        np.testing.assert_array_equal(repeated[:, :, n], X[:, :, n // 2])


def test_as_many_heads_are_not_copied():
    assert repeat_heads(X, K) is X


def test_positions_are_padded_with_zeros_to_whole_blocks():
    padded = heads_first(X, 4)
    assert padded.shape == (B, K, 8, H)
    np.testing.assert_array_equal(padded[:, :, :T], X.swapaxes(1, 2))
    assert not padded[:, :, T:].any()
