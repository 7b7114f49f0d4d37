"""The choice of the implementation that computes attention.

The implementations: "einsum" is the equation itself, `attention.dot_product_attention`.
"blocked" is `blocked_attention`, whose memory does not grow with T × S. "short" and
"splash" are kernels for TPUs, "cudnn" is one for NVIDIA GPUs, and "jax" is
`library_attention`. "auto" is a kernel of the platform if one supports the call and the
lengths, or else "blocked" for long sequences and "einsum" for short ones.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from transformer_jax.errors import UserError
from transformer_jax.models.kernels import plain, platforms, short
from transformer_jax.models.kernels.accelerators import (
    cudnn_attention,
    cudnn_runs_here,
    short_attention,
    splash_attention,
)
from transformer_jax.models.kernels.blocked import blocked_attention
from transformer_jax.models.kernels.difference import DROPPED, TOLERANCES, difference
from transformer_jax.models.kernels.library import library_attention
from transformer_jax.models.masks import Mask

log = logging.getLogger(__name__)

Array = jax.Array
Function = Callable[..., Array]
# Pairs (key of `BlockConfig`, remedy) for what a kernel lacks.
Lacks = Iterable[tuple[str, str]]

IMPLEMENTATIONS = ("auto", "einsum", "blocked", "short", "splash", "cudnn", "jax")


class Needs(NamedTuple):
    """The demands of a model on a kernel. The names are those of `BlockConfig`."""

    dropout_rate: float
    positions: str
    dtype: str
    head_dim: int
    value_dim: int


class Kernel(NamedTuple):
    """An implementation of attention for some models, platforms and lengths.

    fewest, most: "auto" takes it for these numbers of queries and of keys.
    has_dropout: it supports dropout on the attention weights.
    any_value_dim: it supports values of another width than keys.
    lacks: maps `Needs` to what else it does not support.
    longest: maps (head_dim, dtype) to the most positions that it supports.
    runs_here: returns True if this device can run it.
    checked: "auto" takes it only if it computes the equation on this device.
    """

    name: str
    function: Function
    fewest: int
    most: float
    has_dropout: bool = False
    any_value_dim: bool = False
    lacks: Callable[[Needs], Lacks] = lambda needs: ()
    longest: Callable[[int, str], float] = lambda head_dim, dtype: math.inf
    runs_here: Callable[[], bool] = lambda: True
    checked: bool = False

    def unsupported(self, needs: Needs) -> Iterator[tuple[str, str]]:
        """Yield (key of `BlockConfig`, remedy) for what it lacks."""
        if needs.dropout_rate and not self.has_dropout:
            yield "attention_dropout_rate", "0"
        if needs.positions in ("relative", "relative_bias"):
            yield "positions", "another value"
        if needs.value_dim != needs.head_dim and not self.any_value_dim:
            yield "value_dim", f"head_dim = {needs.head_dim}"
        yield from self.lacks(needs)

    def obstacle(self, needs: Needs, length: int, equation: Callable[..., Any]) -> str:
        """Return what it does not support on this device, or "".

        `length` is the larger number of queries and keys. For `equation` see
        `kernel_for`.
        """
        missing = [f"this value of {name}" for name, _ in self.unsupported(needs)]
        if not self.runs_here():
            missing.append("this device")
        if missing:
            return " or ".join(missing)
        longest = self.longest(needs.head_dim, needs.dtype)
        if longest < length <= self.most:
            return f"more than {longest} positions with this head_dim"
        drops = needs.dropout_rate > 0
        if self.checked and not _is_right(
            self, equation, drops, needs.dtype, needs.head_dim
        ):
            return "this chip, on which it failed its check"
        return ""


def _lacks_of_short(needs: Needs) -> Lacks:
    if not short.supports(needs.head_dim):
        yield "head_dim", "a divisor of 128, or a multiple of it"


def _lacks_of_splash(needs: Needs) -> Lacks:
    """Products in bfloat16 do not compile where those of float32 are precise."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if needs.dtype == "bfloat16" and precision not in (None, "default", "bfloat16"):
        yield "dtype", f"'float32', as jax_default_matmul_precision is {precision!r}"


def _lacks_of_cudnn(needs: Needs) -> Lacks:
    if needs.dtype != "bfloat16":
        yield "dtype", "'bfloat16'"
    if needs.head_dim % 8 or needs.head_dim > 128:
        yield "head_dim", "a multiple of 8, at most 128"


# docs/log.md (2026-11-25) has the figures behind the lengths.
SHORT = Kernel(
    "short",
    short_attention,
    fewest=16,
    most=short.LONGEST,
    has_dropout=True,
    lacks=_lacks_of_short,
    longest=short.longest,
    checked=True,
)
SPLASH = Kernel(
    "splash",
    splash_attention,
    fewest=256,
    most=math.inf,
    any_value_dim=True,
    lacks=_lacks_of_splash,
)
CUDNN = Kernel(
    "cudnn",
    cudnn_attention,
    fewest=128,
    most=math.inf,
    lacks=_lacks_of_cudnn,
    runs_here=cudnn_runs_here,
)
# not a kernel of a platform: "auto" never takes it
LIBRARY = Kernel("jax", library_attention, fewest=0, most=math.inf)
# The kernels of a platform. "auto" takes the first one without an obstacle.
KERNELS = {"tpu": (SHORT, SPLASH), "gpu": (CUDNN,), "cuda": (CUDNN,)}
# Without a kernel, "auto" chooses "blocked" from this many positions on. On
# accelerators, blocks are only worth the memory they save.
BLOCKED_FROM = {"cpu": 192}
BLOCKED_FROM_ELSEWHERE = 2048


def kernel_for(
    how: str,
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask,
    dropout_rate: float,
    dtype: str,
    equation: Callable[..., Any],
    adds_scores: bool = False,
) -> Function | None:
    """Return the function that `how` stands for, or None for the equation itself.

    The arguments are those of the function: query (B, T, N, H), key (B, S, K, H), value
    (B, S, K, H'). `dropout_rate` is 0 where there is no dropout. `equation` is
    `attention.dot_product_attention`, to check a kernel with. `adds_scores`: a bias or
    relative positions are added to the scores, which only the equation does.

    Raises:
        UserError: `how` does not support the lengths, or does not run on this platform.
    """
    if how == "einsum" or plain.is_on():
        return None
    if adds_scores:
        if how == "auto" and KERNELS.get(platform := platforms.current()):
            _log_once(f"einsum, which alone adds to the scores ({platform})")
        return None
    if how == "jax":
        return LIBRARY.function
    length = query.shape[1]
    key_length = key.shape[1]
    if not isinstance(length, int) or not isinstance(key_length, int):
        if how != "auto":
            raise UserError(
                f"implementation = {how!r}: does not support the symbolic lengths "
                f"{length} and {key_length} of jax.export; "
                "use 'auto', 'einsum' or 'jax'"
            )
        return None
    if mask.allowed is not None:
        return None
    if how == "blocked":
        return blocked_attention
    needs = Needs(dropout_rate, "none", dtype, query.shape[3], value.shape[3])
    if how == "auto":
        function, reason = _automatic(needs, length, key_length, equation)
        if reason and length > 1:  # nothing is logged for each step of decoding
            _log_once(reason)
        return function
    return _named(how, needs, length, key_length)


def unsupported(implementation: str, needs: Needs) -> Iterator[tuple[str, str]]:
    """Yield (key of `BlockConfig`, remedy) for what an implementation lacks."""
    for kernel in (SHORT, SPLASH, CUDNN, LIBRARY):
        if kernel.name == implementation:
            yield from kernel.unsupported(needs)
    if implementation == "blocked" and needs.positions == "relative_bias":
        yield "positions", "another value"


def shares_past() -> bool:
    """Return True if the hypotheses of a row should share one cache in a search.

    On CPUs, copying keys and values takes less time than attending to those of all
    hypotheses.
    """
    return not platforms.is_cpu()


def _named(name: str, needs: Needs, length: int, key_length: int) -> Function:
    """Return the function of a kernel that the user has chosen."""
    platform = platforms.current()
    kernels = {kernel.name: kernel for kernel in KERNELS.get(platform, ())}
    if name not in kernels:
        raise UserError(
            f"implementation = {name!r}: does not run on this platform, "
            f"{platform!r}; use 'auto'"
        )
    most = kernels[name].longest(needs.head_dim, needs.dtype)
    if max(length, key_length) > most:
        raise UserError(
            f"implementation = {name!r}: supports at most {most} positions, but "
            f"there are {length} queries and {key_length} keys; use 'auto'"
        )
    return kernels[name].function


def _automatic(
    needs: Needs, length: int, key_length: int, equation: Callable[..., Any]
) -> tuple[Function | None, str]:
    """Return the function that "auto" stands for, and why.

    There is no reason for the equation on a platform without kernels.
    """
    platform = platforms.current()
    kernels = KERNELS.get(platform, ())
    fewest, most = sorted((length, key_length))
    where = platform
    needed = []  # positions, of the kernels for which there are too few
    for kernel in kernels:
        if obstacle := kernel.obstacle(needs, most, equation):
            where += f"; {kernel.name} does not support {obstacle}"
        elif kernel.fewest <= fewest and most <= kernel.most:
            bounds = f"{kernel.fewest} to {kernel.most}"
            if kernel.most == math.inf:
                bounds = f"at least {kernel.fewest}"
            return kernel.function, _reason(kernel.name, bounds, platform)
        elif most <= kernel.most:
            needed.append(kernel.fewest)
    from_here = BLOCKED_FROM.get(platform, BLOCKED_FROM_ELSEWHERE)
    if most >= from_here:
        return blocked_attention, _reason("blocked", f"at least {from_here}", where)
    bounds = f"fewer than {min(needed, default=from_here)}"
    return None, _reason("einsum", bounds, where) if kernels else ""


def _reason(name: str, bounds: str, where: str) -> str:
    return f"{name}, as there are {bounds} positions ({where})"


@functools.cache
def _log_once(reason: str) -> None:
    """Log a choice for the first of all the lengths that it holds for."""
    log.info("attention: %s", reason)


@functools.cache
def _is_right(
    kernel: Kernel,
    equation: Callable[..., Any],
    drops: bool,
    dtype: str,
    head_dim: int,
) -> bool:
    """Return True if a kernel computes the equation on this machine's accelerator.

    A warning says so if it does not. A kernel that is compiled for another machine
    cannot be checked, and is taken. The check runs in a thread of its own, because the
    caller is tracing a program.
    """
    if jax.default_backend() != platforms.current():
        return True
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(
            difference,
            kernel.function,
            equation,
            length=kernel.longest(head_dim, dtype),
            dropout_rate=DROPPED if drops else 0.0,
            dtype=dtype,
            head_dim=head_dim,
            value_dim=head_dim,
        )
    try:
        apart = checked.result()
    except Exception as error:
        log.warning("attention: %s does not run here: %s", kernel.name, error)
        return False
    if apart <= TOLERANCES[dtype]:
        return True
    log.warning(
        "attention: %s is not used: it differs from the equation by %.1g here, and may "
        "differ by %.1g; please report this with the output of scripts/verify.py",
        kernel.name,
        apart,
        TOLERANCES[dtype],
    )
    return False
