"""The pairs and the checkpoint that measure a model before fine-tuning."""

from transformer_jax.claims.layers import Early, first_of_each, training
from transformer_jax.minimal_pairs import Pairs


def test_the_first_pairs_of_each_paradigm():
    groups = [("syntax", "islands", paradigm) for paradigm in "aabab"]
    good = ["g0", "g1", "g2", "g3", "g4"]
    bad = ["b0", "b1", "b2", "b3", "b4"]
    kept = first_of_each(Pairs(groups, good, bad), 2)
    assert [paradigm for _, _, paradigm in kept.groups] == ["a", "a", "b", "b"]
    assert kept.good == ["g0", "g1", "g2", "g4"]
    assert kept.bad == ["b0", "b1", "b2", "b4"]


def test_an_early_score_is_of_the_same_training():
    early = Early(training, 250)
    assert early.design == {**training.design, "step": 250}
