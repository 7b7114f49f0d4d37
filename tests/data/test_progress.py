"""Long work tells how far it has come."""

import logging
import time

import numpy as np
import pytest

from transformer_jax.data import progress, tokenizers
from transformer_jax.data.tokenizer_training import train_tokenizer


@pytest.fixture
def lines(monkeypatch, caplog):
    """The log, which has a line after every millisecond of work."""
    monkeypatch.setattr(progress, "EVERY", (0.001, 0.001))
    caplog.set_level(logging.INFO, "transformer_jax")
    return caplog


def appears(message, lines):
    """Return True as soon as the log has a message, False if it does not come."""
    for _ in range(10_000):
        if message in lines.messages:
            return True
        time.sleep(0.001)
    return False


def test_long_work_is_logged_with_its_progress(lines):
    with progress.progress("reading", 1200) as advance:
        advance(700)
        assert appears("reading: 700 of 1,200 lines", lines)


def test_work_of_unknown_length_is_logged_with_its_time(lines):
    with progress.progress("training"):
        assert appears("training: 0 s so far", lines)


def test_only_the_innermost_work_is_logged(lines):
    with progress.progress("outer"):
        with progress.progress("inner"):
            assert appears("inner: 0 s so far", lines)
            time.sleep(0.01)  # for what the outer work may have begun to write
            lines.clear()
            assert appears("inner: 0 s so far", lines)
            assert set(lines.messages) == {"inner: 0 s so far"}
        assert appears("outer: 0 s so far", lines)


def test_short_work_is_silent(caplog):
    caplog.set_level(logging.INFO, "transformer_jax")
    with progress.progress("short", 3):
        pass
    assert not caplog.messages


def test_encoding_many_lines_tells_how_far_it_is(lines, monkeypatch):
    monkeypatch.setattr(tokenizers, "CHUNK", 1000)
    tokenizer = train_tokenizer("characters", ["ek at"], 20)
    many = ["ek " * 500] * 10_000
    encoded = tokenizer.encode(many)
    assert np.array_equal(encoded[0], tokenizer.encode(many[:1])[0])
    assert any(
        line.startswith("encoding text: ") and line.endswith("0 of 10,000 lines")
        for line in lines.messages
    )


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 lines"), (1, "1 line"), (1014, "1,014 lines")]
)
def test_counts_agree_with_their_nouns(count, words):
    assert progress.counted(count, "line") == words
    assert progress.counted(count, "entry", "entries") == words.replace(
        "lines", "entries"
    ).replace("line", "entry")
