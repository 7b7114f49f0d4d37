"""Random bits for dropout: a hash of the place of each element.

On CPUs, JAX's generators take as long as a matrix product of the same size. This hash
takes about as long as an addition. Every device draws the same bits, on every mesh and
in every block, because the place of an element is that in the whole array.
"""

import math

import jax
import jax.numpy as jnp

Array = jax.Array

GOLDEN = 0x9E3779B9  # 2³² / golden ratio, which spreads neighboring indices


def hashed_bits(
    key: Array,
    index: Array,
) -> Array:
    """Return random uint32 of the shape of `index`.

    They are a hash of each uint32 in it and two words drawn from the key. The index
    should be that in the whole array, see `indices`. The bits repeat after 2³²
    elements.

    Use this for dropout only. There is one round of a hash per word (lowbias32, from
    Wellons 2018, "Prospecting for Hash Functions"). The bits pass the tests in
    tests/models/kernels/test_bits.py; their quality is not known beyond that.
    """
    first, second = hash_words(key)
    spread = index * jnp.uint32(GOLDEN) + first
    return hashed(spread, second)


def drop(
    x: Array,
    rate: float,
    key: Array,
    index: Array,
) -> Array:
    """Set each element of x to zero with probability `rate`, and scale the others.

    `index` (uint32) is the place of each element in the whole array. `rate` is rounded
    to a multiple of 2⁻³², see `threshold`.
    """
    cut = threshold(rate)
    if cut == 0:
        return x
    bits = hashed_bits(key, index)
    kept = bits >= jnp.uint32(cut)
    scaled = x * scale(cut)
    return jnp.where(kept, scaled, jnp.zeros_like(x))


def threshold(rate: float) -> int:
    """Return the uint32 below which a share `rate` of all uint32 lies."""
    return round(rate * 2**32)


def scale(cut: int) -> float:
    """Return 1 / (1 - rate) for the threshold `cut` of a rate."""
    return 2**32 / (2**32 - cut)


def hash_words(key: Array) -> Array:
    """Return the two words (2,) of uint32 that `hashed_bits` draws from a key."""
    return jax.random.bits(key, (2,), jnp.uint32)


def hashed(
    spread: Array,
    second: Array,
) -> Array:
    """Return the bits of `hashed_bits`.

    `spread` is index · GOLDEN + the first word, and `second` the second word.
    """

    def mix(h: Array) -> Array:
        h = h ^ (h >> 16)
        h = h * jnp.uint32(0x7FEB352D)
        h = h ^ (h >> 15)
        h = h * jnp.uint32(0x846CA68B)
        return h ^ (h >> 16)

    return mix(mix(spread) ^ second)


def indices(shape: tuple[int, ...]) -> Array:
    """Return the index of each element of an array of `shape`, as uint32.

    The order is row-major.
    """
    flat = jax.lax.iota(jnp.uint32, math.prod(shape))
    return flat.reshape(shape)
