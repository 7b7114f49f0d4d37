"""The keys of `generate` in generation_config.json, and our settings of decoding."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformer_jax.interop.tensors import InteropError

Json = Mapping[str, Any]
WHERE = "generation_config.json or config.json"

# Every key of `generate`, and the values with which it changes nothing; null never
# does.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "do_sample": (False,),
    "dola_layers": (),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "max_length": (),
    "max_new_tokens": (),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "prefix_allowed_tokens_fn": (),
    "remove_invalid_values": (False, True),
    "renormalize_logits": (False,),
    "repetition_penalty": (1,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "temperature": (1,),
    "token_healing": (False,),
    "top_h": (),
    "top_k": (0, 50),
    "top_p": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
OF_SAMPLING = {
    "temperature",
    "top_h",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
}
OF_BEAMS = {"diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups"}
# Those that `rules` reads, and those that only an encoder–decoder has.
RULES = {
    "bad_words_ids",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "suppress_tokens",
}
OF_DECODERS = {"forced_bos_token_id", "min_length", "renormalize_logits"}


# Our settings, and the values with which they change nothing.
DEFAULTS: Mapping[str, Any] = {
    "end_ids": (),
    "forbidden_ids": (),
    "min_tokens": 0,
    "no_repeat_ngram": 0,
    "repetition_penalty": 1.0,
    "first_id": -1,
    "renormalize": False,
}


def rules(config: Json) -> dict[str, Any]:
    """Return the settings of decoding that are not the defaults, by their names in the
    section `decoding`.

    Raises InteropError for a value of another type.
    """
    given = {key: value for key, value in config.items() if value is not None}
    ends = _ids(given, "eos_token_id")
    excluded_anyway = {
        *ends,
        given.get("decoder_start_token_id"),
        given.get("pad_token_id"),
    }
    forbidden = [
        ids[0]
        for ids in _sequences(given)
        if len(ids) == 1 and ids[0] not in excluded_anyway
    ]
    forbidden += _ids(given, "suppress_tokens")
    min_tokens = 0
    if given.get("min_new_tokens"):
        min_tokens = _number(given, "min_new_tokens", 0) + 1
    penalty = _number(given, "repetition_penalty", 1.0, (int, float))
    return _changed(
        {
            "end_ids": ends if len(ends) > 1 else (),
            "forbidden_ids": tuple(dict.fromkeys(forbidden)),
            "min_tokens": min_tokens,
            "no_repeat_ngram": _number(given, "no_repeat_ngram_size", 0),
            "repetition_penalty": float(penalty),
        }
    )


def rules_of_decoders(config: Json) -> dict[str, Any]:
    """Return what `rules` returns, and the settings that only an encoder–decoder
    has.
    """
    given = {key: value for key, value in config.items() if value is not None}
    common = rules(given)
    least = max(_number(given, "min_length", 0), common.get("min_tokens", 0))
    of_decoders = {
        "min_tokens": least if least > 1 else 0,
        "first_id": _number(given, "forced_bos_token_id", -1),
        "renormalize": _number(given, "renormalize_logits", False, (bool,)),
    }
    return common | _changed(of_decoders)


def keys_of(settings: Mapping[str, Any], end: int | None) -> dict[str, Any]:
    """Return the keys of `generate` for settings of `decoding` that are not the
    defaults: the inverse of `rules`.
    """
    ours = _changed({key: value for key, value in settings.items() if key in DEFAULTS})
    names = {
        "no_repeat_ngram": "no_repeat_ngram_size",
        "repetition_penalty": "repetition_penalty",
    }
    names |= {"first_id": "forced_bos_token_id", "renormalize": "renormalize_logits"}
    content = {theirs: ours[name] for name, theirs in names.items() if name in ours}
    if "forbidden_ids" in ours:
        content["suppress_tokens"] = list(ours["forbidden_ids"])
    if ours.get("min_tokens", 0) > 1:
        content["min_new_tokens"] = ours["min_tokens"] - 1
    if "end_ids" in ours:
        ends = [] if end is None else [end]
        content["eos_token_id"] = list(dict.fromkeys([*ends, *ours["end_ids"]]))
    return content


def _changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not the defaults."""
    return {key: value for key, value in settings.items() if value != DEFAULTS[key]}


def ignored(config: Json, supported: set[str]) -> Iterator[str]:
    """Yield "key = value" for each key that changes what `generate` returns, and is
    not supported.
    """
    unused = set() if config.get("do_sample") else OF_SAMPLING
    if config.get("num_beams") in (None, 1):
        unused = unused | OF_BEAMS
    for key, neutral in NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral and key not in supported | unused:
            yield f"{key} = {value!r:.80}"
    if any(len(ids) > 1 for ids in _sequences(config)):
        yield "bad_words_ids of several tokens"


def _sequences(config: Json) -> list[list[int]]:
    """Return bad_words_ids, a list of lists of ids."""
    sequences = config.get("bad_words_ids") or []
    if not isinstance(sequences, list) or not all(map(_is_ids, sequences)):
        raise InteropError(
            f"{WHERE}: bad_words_ids = {sequences!r:.80} must be a list of lists of "
            "ids: copy the file again"
        )
    return sequences


def _is_ids(value: Any) -> bool:
    """Return True for a list of ids that is not empty."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(i) is int for i in value)


def _ids(config: Json, key: str) -> tuple[int, ...]:
    """Return one id, or a list of ids, as a tuple."""
    value = config.get(key)
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in listed):
        raise InteropError(
            f"{WHERE}: {key} = {value!r:.80} must be an id or a list of ids: "
            "copy the file again"
        )
    return tuple(listed)


def _number(
    config: Json, key: str, default: Any, kinds: tuple[type, ...] = (int,)
) -> Any:
    value = config.get(key, default)
    if type(value) not in kinds:
        raise InteropError(
            f"{WHERE}: {key} = {value!r:.80} must be of type {kinds[-1].__name__}: "
            "copy the file again"
        )
    return value
