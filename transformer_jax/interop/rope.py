"""The keys of config.json for rotary positions, and our fields, in both directions."""

import math
from collections.abc import Mapping
from typing import Any

from transformer_jax.interop.architecture import Json, typed
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models.gpt import GPTConfig

# rope_type → rotary_scaling
KINDS = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
}
LENGTH = "original_max_position_embeddings"
# rope_type → keys for our fields slow and fast, and their defaults in transformers
TURNS: Mapping[str, Mapping[str, tuple[str, float | None]]] = {
    "llama3": {
        "rotary_slow": ("low_freq_factor", None),
        "rotary_fast": ("high_freq_factor", None),
    },
    "yarn": {"rotary_slow": ("beta_slow", 1.0), "rotary_fast": ("beta_fast", 32.0)},
}


def read(config: Json) -> dict[str, Any]:
    """Return fields of our model config.

    Raises InteropError for a kind that is unknown, or whose numbers are not supported.
    """
    rotary = _settings(config)
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in list(KINDS):
        raise InteropError(
            f"config.json: rope_type = {kind!r} is not supported: "
            f"choose from {', '.join(KINDS)}"
        )
    if (part := rotary.get("partial_rotary_factor", 1)) != 1:
        raise InteropError(
            f"config.json: partial_rotary_factor = {part!r} is not supported, only 1"
        )
    fields: dict[str, Any] = {"rotary_scaling": KINDS[kind]}
    if kind == "default":
        return fields
    longest = typed(config, "max_position_embeddings", 2048, int)
    length = longest
    if kind in TURNS:
        length = typed(rotary, LENGTH, longest, int)
        for field, (key, default) in TURNS[kind].items():
            fields[field] = _number(rotary, key, default, kind)
    ratio = longest / length if kind == "yarn" else None
    fields["rotary_factor"] = _number(rotary, "factor", ratio, kind)
    if kind == "yarn":
        _check_yarn(rotary, fields["rotary_factor"])
    return fields | {"rotary_length": length}


def base(config: Json) -> Any:
    """Return the value of rope_theta, or None."""
    return _settings(config).get("rope_theta", config.get("rope_theta"))


def write(model: GPTConfig) -> dict[str, Any]:
    """Return the value of rope_parameters.

    Raises InteropError for "dynamic" positions with a length of their own.
    """
    names = {ours: theirs for theirs, ours in KINDS.items()}
    kind = names[model.rotary_scaling]
    rotary: dict[str, Any] = {"rope_type": kind, "rope_theta": model.rotary_base}
    if kind == "default":
        return rotary
    rotary["factor"] = model.rotary_factor
    if kind == "dynamic" and model.rotary_length != model.max_length:
        raise InteropError(
            f"config.model.rotary_length = {model.rotary_length}: transformers has "
            f"only config.model.max_length = {model.max_length} in 'dynamic' positions"
        )
    if kind in TURNS:
        rotary[LENGTH] = model.rotary_length
        for field, (key, _) in TURNS[kind].items():
            rotary[key] = getattr(model, field)
    return rotary


def _settings(config: Json) -> dict[str, Any]:
    """Return the keys of rope_parameters, and of its name in older files."""
    old = typed(config, "rope_scaling", {}, dict)
    settings = old | typed(config, "rope_parameters", {}, dict)
    for key, value in settings.items():
        if isinstance(value, Mapping):
            raise InteropError(
                f"config.json: rope_parameters has positions for {key!r} alone: "
                "supported are those that all layers share"
            )
    return {key: value for key, value in settings.items() if value is not None}


def _number(rotary: Json, key: str, default: float | None, kind: str) -> float:
    value = typed(rotary, key, default, float)
    if value is None:
        raise InteropError(
            f"config.json: rope_parameters lacks {key}, which rope_type = {kind!r} "
            "needs: copy the file again"
        )
    return float(value)


def _check_yarn(rotary: Json, factor: float) -> None:
    """Raise InteropError for choices that the paper does not have."""
    if not rotary.get("truncate", True):
        raise InteropError("config.json: truncate = False is not supported, only True")
    both: list[Any] = [rotary.get(key) for key in ("mscale", "mscale_all_dim")]
    given = rotary.get("attention_factor")
    expected = _magnitude(factor)
    if given is None:
        given = expected
        if all(both):
            given = _magnitude(factor, both[0]) / _magnitude(factor, both[1])
    if not math.isclose(given, expected, rel_tol=1e-6):
        raise InteropError(
            f"config.json: attention_factor = {given} (or mscale and mscale_all_dim, "
            f"which determine it) is not supported, only {expected} for factor = "
            f"{factor}"
        )


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
