"""The end of a text that is still being written."""

import numpy as np
import pytest

from helpers.searching import PAD
from transformer_jax.decoding.stopping import before_end, certain, cut_at


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [
        ("ab\ncd", ("\n",), "ab"),
        ("ab\ncd", ("cd", "\nc", "x"), "ab"),
        ("\nab", ("\n",), ""),
        ("ab", ("\n", "abc"), None),
        ("ab", (), None),
    ],
)
def test_a_text_ends_before_the_first_stop_string(text, stop, cut):
    assert cut_at(text, stop) == cut


@pytest.mark.parametrize(
    ("text", "stop", "stays"),
    [
        ("ab", (), "ab"),
        ("ab\n", ("\n\nUser:",), "ab"),
        ("ab\n\nUse", ("\n\nUser:", "e!"), "ab"),
        ("abaa", ("aab", "x"), "ab"),
        ("ab\ufffd", ("b?",), "a"),
        ("\ufffda", (), "\ufffda"),
    ],
)
def test_what_may_still_change_is_held_back(text, stop, stays):
    assert certain(text, stop) == stays


def test_a_text_ends_before_the_first_end():
    tokens = np.array([3, 4, 5, 4, PAD])
    assert before_end(tokens, (5, 4)).tolist() == [3]
    assert before_end(tokens, ()).tolist() == tokens.tolist()
