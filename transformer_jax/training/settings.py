"""Settings of JAX that change numbers.

They are stored with each checkpoint and compared when a run continues.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib

from transformer_jax.errors import UserError

log = logging.getLogger(__name__)

# Other values of these give other random numbers or other types: another experiment.
MEANING = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_numpy_dtype_promotion",
)
# Other values of these round differently.
ROUNDING = ("jax_default_matmul_precision",)


def current() -> dict[str, Any]:
    """Return the settings of this process that change numbers, as JSON values by
    name.
    """
    settings = {name: getattr(jax.config, name, None) for name in (*MEANING, *ROUNDING)}
    plain = {
        name: x if isinstance(x, bool | int | None) else str(x)
        for name, x in settings.items()
    }
    return plain | {
        "XLA_FLAGS": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device": jax.devices()[0].device_kind,
    }


def shared(now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be the same in all processes of a run.

    XLA_FLAGS may name files of a host.
    """
    return {name: now[name] for name in (*MEANING, *ROUNDING, "jax", "jaxlib")}


def check(stored: Mapping[str, Any], now: Mapping[str, Any], where: Any) -> None:
    """Compare the settings of a run with those that it had when the checkpoint in
    `where` was saved.

    Raises UserError if they give other random numbers or types. Logs those that only
    round differently. A setting that was not stored, by an older version, is not
    compared.
    """
    differing = [name for name in stored if name in now and stored[name] != now[name]]
    messages = {
        name: f"{name} = {now[name]!r}, but {stored[name]!r} when {where} was saved"
        for name in differing
    }
    if refused := [messages[name] for name in differing if name in MEANING]:
        raise UserError(
            "\n".join(refused)
            + "\nThe run would continue with other random numbers or types. Set the"
            " old values, e.g. by an environment variable such as"
            f" {MEANING[0].upper()}, or choose another --workdir."
        )
    for name in differing:
        log.warning(
            "%s: the run continues with other rounding, not bit for bit", messages[name]
        )
