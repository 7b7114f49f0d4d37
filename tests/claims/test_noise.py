"""Noise in texts: which characters change, and how many."""

import random

import pytest

from transformer_jax.claims.noise import replaced, swapped

TEXT = "What is the capital of Norway , in 2 words ? " * 100


@pytest.mark.parametrize("noise", [replaced, swapped])
def test_no_noise_changes_nothing(noise):
    assert noise(TEXT, 0.0, random.Random(0)) == TEXT


@pytest.mark.parametrize("noise", [replaced, swapped])
def test_noise_keeps_spaces_digits_and_signs_in_their_places(noise):
    noisy = noise(TEXT, 0.5, random.Random(0))
    pairs = zip(TEXT, noisy, strict=True)
    assert all(old == new for old, new in pairs if not old.isalpha())


@pytest.mark.parametrize("noise", [replaced, swapped])
def test_the_noise_depends_on_the_generator_alone(noise):
    noisy = noise(TEXT, 0.3, random.Random(1))
    assert noise(TEXT, 0.3, random.Random(1)) == noisy
    assert noise(TEXT, 0.3, random.Random(2)) != noisy


def test_every_letter_can_be_replaced_by_another_one():
    noisy = replaced(TEXT, 1.0, random.Random(0))
    letters = [
        (old.lower(), new)
        for old, new in zip(TEXT, noisy, strict=True)
        if old.isalpha()
    ]
    assert all(old != new and new.islower() for old, new in letters)


def test_a_share_of_the_letters_is_replaced():
    noisy = replaced("a" * 20_000, 0.3, random.Random(0))
    changed = 20_000 - noisy.count("a")
    assert changed / 20_000 == pytest.approx(0.3, abs=0.02)


def test_a_share_of_the_letters_is_swapped():
    """Each swap of "ab" or "ba" in the alternating word changes two letters."""
    word = "ab" * 10_000
    noisy = swapped(word, 0.3, random.Random(0))
    changed = sum(old != new for old, new in zip(word, noisy, strict=True))
    assert changed / len(word) == pytest.approx(0.3, abs=0.02)


def test_all_letters_are_swapped_with_their_neighbours():
    assert swapped("abcde fg h", 1.0, random.Random(0)) == "badce gf h"
