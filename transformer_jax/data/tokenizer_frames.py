"""What a tokenizer says about the special tokens of a text in transformers."""

import json

from transformer_jax.data.tokenizers import Tokenizer


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


def mask_takes_space(tokenizer: Tokenizer) -> bool:
    """Return True if the mask stands for a token and the spaces before it."""
    return any(
        token["lstrip"]
        for token in json.loads(tokenizer.to_json())["added_tokens"]
        if token["id"] == tokenizer.mask_id
    )
