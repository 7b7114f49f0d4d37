"""Statistics of the random bits for dropout."""

import hashlib
import math

import jax
import numpy as np

from helpers.processes import on_devices
from transformer_jax.models.kernels.bits import hashed_bits, indices
from transformer_jax.models.layers import dropout


def hashed(seed, *shape):
    """Return one stream of dropout bits as 32 columns of ±1, (n, 32)."""
    bits = np.asarray(hashed_bits(jax.random.key(seed), indices(shape))).ravel()
    return 2.0 * ((bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1) - 1


def test_hashed_bits_are_fair_and_uncorrelated_over_positions():
    n = 2**17
    signs = hashed(5, n)
    assert np.abs(signs.mean(axis=0)).max() < 5 / np.sqrt(n)
    assert np.abs(signs.T @ signs / n - np.eye(32)).max() < 5 / np.sqrt(n)
    for lag in (1, 2, 7, 24, 128, 24 * 128, 2**16):
        assert np.abs(signs[lag:].T @ signs[:-lag] / (n - lag)).max() < 5.5 / np.sqrt(
            n - lag
        )
    bits = np.asarray(hashed_bits(jax.random.key(5), indices((n,))))
    counts = np.bincount(bits >> 24, minlength=256)
    assert abs(((counts - n / 256) ** 2 / (n / 256)).sum() - 255) < 5 * np.sqrt(2 * 255)
    # as many collisions as expected by chance
    assert abs(len(np.unique(bits)) - (n - n**2 / 2**33)) < 12


def test_hashed_bits_of_different_keys_are_independent():
    """The keys are those of layers and steps: folded from one key, or made from
    neighbouring seeds.
    """
    key, n = jax.random.key(0), 2**13
    keys = [jax.random.fold_in(key, i) for i in range(16)] + [
        jax.random.key(i) for i in range(1, 17)
    ]
    streams = np.stack([np.asarray(hashed_bits(k, indices((n,)))) for k in keys])
    assert len(np.unique(streams[:, 0])) == len(keys)
    for shift in (0, 1, 128):  # also against shifted streams
        dropped = np.float64(streams < 0.3 * 2**32) - 0.3
        correlation = (
            dropped[:, shift:] @ dropped[:, : n - shift].T / (0.21 * (n - shift))
        )
        np.fill_diagonal(correlation, 0)
        assert np.abs(correlation).max() < 5.5 / np.sqrt(n - shift)


def test_a_dropped_row_is_as_likely_as_chance_has_it():
    """The number of dropped values among 16 neighbours is binomial.

    Correlations of pairs would miss clusters.
    """
    dropped = np.asarray(hashed_bits(jax.random.key(9), indices((2**15, 16)))) < 2**31
    counts = np.bincount(dropped.sum(axis=1), minlength=17)
    expected = np.array([math.comb(16, k) for k in range(17)]) / 2**16 * 2**15
    assert ((counts - expected) ** 2 / expected)[2:15].sum() < 13 + 5 * np.sqrt(2 * 13)


def test_hashed_bits_do_not_depend_on_the_mesh():
    """Bits depend on the global index, so an array sharded over 8 devices has the
    same dropout as on one.
    """
    shape = (8, 16, 6)
    program = f"""
import hashlib, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transformer_jax.models.layers import dropout
x = np.float32(np.random.default_rng(0).normal(size={shape}))
for axes, spec in (((8, 1), "a"), ((2, 4), ("a", "b")), ((1, 8), (None, "b"))):
    mesh = jax.make_mesh(axes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    run = jax.jit(
        lambda x, key: dropout(x, 0.3, key),
        in_shardings=(sharding, None),
        out_shardings=sharding,
    )
    y = run(jax.device_put(x, sharding), jax.random.key(0))
    assert len(y.sharding.device_set) == 8
    print(hashlib.sha256(np.asarray(y).tobytes()).hexdigest())
"""
    x = np.float32(np.random.default_rng(0).normal(size=shape))
    here = hashlib.sha256(
        np.asarray(dropout(x, 0.3, jax.random.key(0))).tobytes()
    ).hexdigest()
    assert on_devices(8, program).split() == [here] * 3
