"""Vaswani et al. 2017, Table 1: cost and sequential operations of a layer, by length.

A layer of self-attention, with four heads, and a GRU, both of width 128, read one
sequence of 32 to 2,048 vectors. Measured are the time of forward and backward pass, its
median over five calls, and the longest chain of operations in the program, each of
which needs the result of the one before. The exponent e in t ∝ L^e is fitted to the
four largest lengths.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.claims.claim import Claim, Computed, Expected, Measurements
from transformer_jax.models.attention import MultiHeadAttention
from transformer_jax.models.cells import make_cell

WIDTH, HEADS = 128, 4
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
QUICK = (16, 32, 64)
CALLS = 5
FITTED = 4  # lengths


def self_attention(x: jax.Array) -> Any:
    """Return outputs (1, L, D) for x (1, L, D)."""
    head = WIDTH // HEADS
    return MultiHeadAttention(HEADS, WIDTH, head, head)(x, x)


def recurrent(x: jax.Array) -> Any:
    """Return outputs (1, L, D) of a GRU for x (1, L, D)."""
    return nn.RNN(make_cell("gru", WIDTH))(x)


class Layer(nn.Module):
    """A layer that a function defines."""

    function: Callable[[jax.Array], Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return self.function(x)


def chain(jaxpr: Any) -> int:
    """Return the number of operations on the longest path through a program.

    A call of another program counts as the longest path in that, and a loop as its body
    times the number of its iterations.
    """
    depth: dict[Any, int] = {}
    for equation in jaxpr.eqns:
        variables = [i for i in equation.invars if not hasattr(i, "val")]
        before = max((depth.get(i, 0) for i in variables), default=0)
        own = max(map(chain, programs(equation.params)), default=1)
        if equation.primitive.name == "scan":
            own *= equation.params["length"]
        depth |= dict.fromkeys(equation.outvars, before + own)
    return max(depth.values(), default=0)


def programs(parameters: dict[str, Any]) -> Iterator[Any]:
    """Yield the programs among the parameters of an operation."""
    for value in parameters.values():
        for item in value if isinstance(value, tuple) else (value,):
            program = getattr(item, "jaxpr", item)
            if hasattr(program, "eqns"):
                yield program


def exponent(lengths: Any, values: Any) -> float:
    """Return the slope of log(value) against log(length), by least squares."""
    slope, _ = np.polyfit(np.log(lengths), np.log(values), 1)
    return float(slope)


def median_seconds(function: Callable, *arguments: Any) -> float:
    """Return the median duration of a call of a compiled function."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def of_layer(
    function: Callable[[jax.Array], Any], seed: int, quick: bool
) -> Measurements:
    """Measure the times of a layer, the longest chains, and the exponents of both."""
    lengths = QUICK if quick else LENGTHS
    seconds = []
    chains = []
    for length in lengths:
        layer: Any = Layer(function)
        x_key, init_key = jax.random.split(jax.random.key(seed))
        x = jax.random.normal(x_key, (1, length, WIDTH))
        params = nn.unbox(layer.init(init_key, x))

        def loss(params: Any, x: jax.Array, layer: Any = layer) -> jax.Array:
            return (layer.apply(params, x) ** 2).sum()

        gradient = jax.grad(loss, argnums=(0, 1))
        chains.append(chain(jax.make_jaxpr(gradient)(params, x).jaxpr))
        seconds.append(median_seconds(jax.jit(gradient), params, x))
    largest = lengths[-FITTED:]
    return {
        "exponent of the time": exponent(largest, seconds[-FITTED:]),
        "exponent of the chain": exponent(largest, chains[-FITTED:]),
        "longest chain": chains[-1],
        **{f"ms, L = {i}": 1000 * t for i, t in zip(lengths, seconds, strict=True)},
    }


def condition(function: Callable[[jax.Array], Any]) -> Computed:
    """Return the measurement of the layer that `function` computes."""
    measure = functools.partial(of_layer, function)
    return Computed(measure, {"layer": function.__name__, "width": WIDTH})


CLAIM = Claim(
    statement="Self-attention takes a time that is quadratic in the length and a "
    "constant number of sequential operations, and a recurrent layer takes a linear "
    "time and a linear number of sequential operations",
    source="Vaswani et al. 2017, Table 1 and Section 4",
    conditions={
        "self-attention": condition(self_attention),
        "recurrent": condition(recurrent),
    },
    # Table 1: O(n² d) and O(1) against O(n d²) and O(n). The projections of attention
    # take O(n d²), 4 n d² products against 2 n² d: as many at n = 2 d = 256. By these
    # counts its exponent from 256 to 2,048 is 1.7. Times have overheads and
    # neighbours, hence the wide ranges; the chains are exact.
    expected=(
        Expected(
            "exponent of the time",
            "self-attention",
            least=1.4,
            most=2.3,
            guess=(1.5, 2.0),
        ),
        Expected(
            "exponent of the time",
            "recurrent",
            least=0.7,
            most=1.3,
            guess=(0.85, 1.1),
        ),
        Expected(
            "exponent of the chain",
            "self-attention",
            least=-0.01,
            most=0.01,
            guess=(-0.001, 0.001),
        ),
        Expected(
            "exponent of the chain",
            "recurrent",
            least=0.95,
            most=1.05,
            guess=(0.98, 1.0),
        ),
    ),
    cost="a minute on a core",
)
