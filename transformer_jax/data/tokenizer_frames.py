"""What a tokenizer says about the special tokens of a text in transformers."""

import json
from typing import Any

from transformer_jax.data.tokenizers import Tokenizer, TokenizerError


def separators(tokenizer: Tokenizer) -> int:
    """Return the number of special ids that the tokenizer puts between the texts of a
    pair in transformers, or 1 if it does not say.
    """
    whole = json.loads(tokenizer.to_json()).get("post_processor") or {}
    for step in whole.get("processors", [whole]):
        if step.get("type") == "RobertaProcessing":
            return 2
        if step.get("type") == "TemplateProcessing":
            kinds = [kind for piece in step["pair"] for kind in piece]
            first = kinds.index("Sequence")
            return max(kinds.index("Sequence", first + 1) - first - 1, 1)
    return 1


def frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the tokens that transformers puts before a text, and after its end token.

    "": there is none.

    Raises:
        TokenizerError: it puts no end token there, or other tokens.
    """
    whole = json.loads(tokenizer.to_json()).get("post_processor") or {}
    before: list[str] = []
    after: list[str] = []
    for step in whole.get("processors", [whole]):
        if step.get("type") == "RobertaProcessing":
            before, after = [step["cls"][0]], [step["sep"][0]]
        if step.get("type") == "TemplateProcessing":
            pieces = [piece for entry in step["single"] for piece in entry.items()]
            text = [kind for kind, _ in pieces].index("Sequence")
            tokens = [_token(step, value["id"]) for _, value in pieces]
            before, after = tokens[:text], tokens[text + 1 :]
    end = "" if tokenizer.eos_id is None else tokenizer.tokens([tokenizer.eos_id])[0]
    if len(before) > 1 or len(after) > 2 or after[:1] != [end]:
        raise TokenizerError(
            f"tokenizer.json puts {before} before a text and {after} after it: "
            f"supported are one token before it, the end token {end!r} after it, and "
            "one more token; change its post_processor"
        )
    return "".join(before), "".join(after[1:])


def _token(step: dict[str, Any], name: str) -> str:
    """Return the token that a template calls `name`, or "" for a text."""
    return "".join(step["special_tokens"].get(name, {"tokens": []})["tokens"])


def mask_takes_space(tokenizer: Tokenizer) -> bool:
    """Return True if the mask stands for a token and the spaces before it."""
    return any(
        token["lstrip"]
        for token in json.loads(tokenizer.to_json())["added_tokens"]
        if token["id"] == tokenizer.mask_id
    )
