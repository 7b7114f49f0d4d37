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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
Kernel = Callable[..., Array]

IMPLEMENTATIONS = ("auto", "einsum", "blocked", "short", "splash", "cudnn", "jax")
FUNCTIONS: dict[str, Kernel] = {
    "blocked": blocked_attention,
    "short": short_attention,
    "splash": splash_attention,
    "cudnn": cudnn_attention,
    "jax": library_attention,
}
# The kernels of a platform, and for which lengths "auto" chooses them: the least number
# of queries and of keys, and the most. It takes the first one that supports the call.
# docs/results/accelerators.md has the figures behind them.
CUDNN = {"cudnn": (128, math.inf)}
KERNELS = {
    "tpu": {"short": (16, short.LONGEST), "splash": (256, math.inf)},
    "gpu": CUDNN,
    "cuda": CUDNN,
}
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
) -> Kernel | None:
    """Return the kernel that `how` stands for, or None for the equation itself.

    The arguments are those of the kernel: query (B, T, N, H), key (B, S, K, H), value
    (B, S, K, H'). `dropout_rate` is 0 where there is no dropout. `equation` is
    `attention.dot_product_attention`, to check a kernel with.

    Raises:
        UserError: `how` does not support the lengths, or does not run on this platform.
    """
    if how == "einsum" or plain.is_on():
        return None
    if how == "jax":
        return library_attention
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
    head_dim = query.shape[3]
    value_dim = value.shape[3]
    if how == "auto":
        how = _automatic(
            length, key_length, dropout_rate, dtype, head_dim, value_dim, equation
        )
        return FUNCTIONS.get(how)
    most = longest(how, head_dim, dtype)
    if max(length, key_length) > most:
        raise UserError(
            f"implementation = 'short': supports at most {most} positions, but "
            f"there are {length} queries and {key_length} keys; use 'auto'"
        )
    platform = platforms.current()
    if how != "blocked" and how not in KERNELS.get(platform, {}):
        raise UserError(
            f"implementation = {how!r}: does not run on this platform, "
            f"{platform!r}; use 'auto'"
        )
    return FUNCTIONS[how]


def unsupported(
    implementation: str,
    dropout_rate: float,
    positions: str,
    dtype: str,
    head_dim: int,
    value_dim: int,
) -> Iterator[tuple[str, str]]:
    """Yield (key of `BlockConfig`, remedy) for what an implementation lacks."""
    if implementation not in ("short", "splash", "cudnn", "jax"):
        return
    if dropout_rate and implementation != "short":
        yield "attention_dropout_rate", "0"
    if positions == "relative":
        yield "positions", "another value"
    if value_dim != head_dim and implementation != "splash":
        yield "value_dim", f"head_dim = {head_dim}"
    if implementation == "short" and not short.supports(head_dim):
        yield "head_dim", "a divisor of 128, or a multiple of it"
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if (
        implementation == "splash"
        and dtype == "bfloat16"
        and precision not in (None, "default", "bfloat16")
    ):  # with which it does not compile
        yield "dtype", f"'float32', as jax_default_matmul_precision is {precision!r}"
    if implementation == "cudnn":
        if dtype != "bfloat16":
            yield "dtype", "'bfloat16'"
        if head_dim % 8 or head_dim > 128:
            yield "head_dim", "a multiple of 8, at most 128"


def shares_past() -> bool:
    """Return True if the hypotheses of a row should share one cache in a search.

    On CPUs, copying keys and values takes less time than attending to those of all
    hypotheses.
    """
    return not platforms.is_cpu()


def _automatic(
    length: int,
    key_length: int,
    dropout_rate: float,
    dtype: str,
    head_dim: int,
    value_dim: int,
    equation: Callable[..., Any],
) -> str:
    """Return the implementation that "auto" stands for."""
    platform = platforms.current()
    obstacles = []
    for kernel in KERNELS.get(platform, {}):
        missing = [
            f"this value of {name}"
            for name, _ in unsupported(
                kernel, dropout_rate, "none", dtype, head_dim, value_dim
            )
        ]
        if kernel == "cudnn" and not cudnn_runs_here():
            missing.append("this device")
        if kernel == "short" and not missing:
            most = longest(kernel, head_dim, dtype)
            if most < max(length, key_length) <= short.LONGEST:
                missing.append(f"more than {most} positions with this head_dim")
            elif not _is_right(kernel, equation, bool(dropout_rate), dtype, head_dim):
                missing.append("this chip, on which it failed its check")
        obstacles.append(" or ".join(missing))
    return choose(length, key_length, platform, tuple(obstacles))


def longest(kernel: str, head_dim: int, dtype: str) -> float:
    """Return the most positions that a kernel supports."""
    return short.longest(head_dim, dtype) if kernel == "short" else math.inf


@functools.cache
def _is_right(
    kernel: str, equation: Callable[..., Any], drops: bool, dtype: str, head_dim: int
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
            FUNCTIONS[kernel],
            equation,
            length=longest(kernel, head_dim, dtype),
            dropout_rate=DROPPED if drops else 0.0,
            dtype=dtype,
            head_dim=head_dim,
            value_dim=head_dim,
        )
    try:
        apart = checked.result()
    except Exception as error:
        log.warning("attention: %s does not run here: %s", kernel, error)
        return False
    if apart <= TOLERANCES[dtype]:
        return True
    log.warning(
        "attention: %s is not used: it differs from the equation by %.1g here, and may "
        "differ by %.1g; please report this with the output of scripts/verify.py",
        kernel,
        apart,
        TOLERANCES[dtype],
    )
    return False


@functools.cache
def choose(
    length: int, key_length: int, platform: str, obstacles: tuple[str, ...] = ()
) -> str:
    """Return the implementation that "auto" stands for, and log why.

    obstacles: what each kernel of the platform does not support, "" if it supports the
        call.

    Nothing is logged for one query, nor for the equation on a platform without kernels.
    """
    limits = KERNELS.get(platform, {})
    missing = dict(zip(limits, obstacles, strict=True))
    usable = {name: limits[name] for name in limits if not missing[name]}
    fewest, most = sorted((length, key_length))
    for name, (least, limit) in usable.items():
        if least <= fewest and most <= limit:
            bounds = f"at least {least}"
            if limit != math.inf:
                bounds = f"{least} to {limit}"
            if length > 1:
                _log_choice(name, bounds, platform)
            return name
    where = platform
    for name, obstacle in missing.items():
        if obstacle:
            where += f"; {name} does not support {obstacle}"
    from_here = BLOCKED_FROM.get(platform, BLOCKED_FROM_ELSEWHERE)
    if most >= from_here:
        if length > 1:
            _log_choice("blocked", f"at least {from_here}", where)
        return "blocked"
    if length > 1 and limits:
        fewer = [least for least, limit in usable.values() if most <= limit]
        _log_choice("einsum", f"fewer than {min(fewer, default=from_here)}", where)
    return "einsum"


@functools.cache
def _log_choice(name: str, bounds: str, where: str) -> None:
    """Log a choice once, for the first of all the lengths that it holds for."""
    log.info("attention: %s, as there are %s positions (%s)", name, bounds, where)
