"""Published numbers of chips."""

from transformer_jax.compilation.chips import CHIPS


def test_chips_have_their_published_numbers():
    """Clocks follow from peaks: 1.5 GHz for v5e and 1.75 GHz for v5p, and 1.05 GHz for
    v4, a device of which is half a chip.
    """
    assert CHIPS["v5e"].peak == 197e12
    assert {
        kind: round(chip.clock / 1e9, 2) for kind, chip in CHIPS.items() if chip.clock
    } == {
        "v4": 1.05,
        "v5e": 1.5,
        "v5p": 1.75,
        "v6e": 1.75,
        "tpu7x": 2.2,
    }
    assert CHIPS["v4"].bandwidth == 614e9
    assert CHIPS["h100"].peak == 989.5e12
    assert CHIPS["h100"].bandwidth == 3.35e12
    assert CHIPS["h200"].bandwidth == 4.8e12
