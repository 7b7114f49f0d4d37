"""Parts that all searches share."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.steps import certain, is_end, never_chosen, take


def test_a_certain_token_has_probability_1():
    probabilities = jax.nn.softmax(certain(2, 5))
    np.testing.assert_array_equal(probabilities, [0, 0, 1, 0, 0])


def test_begin_and_padding_are_not_chosen_unless_they_end_an_output():
    assert never_chosen(3, 0, [2]) == [0, 3]
    assert never_chosen(3, None, [2]) == [3]
    assert never_chosen(2, 0, [2, 5]) == [0]


def test_any_of_several_ids_is_an_end():
    ends = is_end(jnp.array([[2, 3], [5, 2]]), (2, 5))
    assert ends.tolist() == [[True, False], [True, True]]


def test_entries_are_taken_row_by_row():
    beams = {"x": jnp.array([[10, 11, 12], [20, 21, 22]])}
    chosen = jnp.array([[2, 2], [0, 1]])
    assert take(beams, chosen)["x"].tolist() == [[12, 12], [20, 21]]
