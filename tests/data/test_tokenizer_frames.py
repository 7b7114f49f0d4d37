"""What the JSON of a tokenizer says about special tokens."""

import pytest
import tokenizers
from tokenizers import processors

from transformer_jax.data.tokenizer_frames import mask_takes_space, separators
from transformer_jax.data.tokenizers import Tokenizer

IDS = {"special_tokens": [("<s>", 0), ("</s>", 1)]}
FRAMES = {
    "none": (None, 1),
    "BERT": (processors.BertProcessing(("</s>", 1), ("<s>", 0)), 1),
    "RoBERTa": (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), 2),
    "a single text": (processors.TemplateProcessing(single="<s> $A </s>", **IDS), 1),
    "XLM-R": (
        processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", **IDS
        ),
        2,
    ),
}
SEVERAL = processors.Sequence([processors.ByteLevel(), FRAMES["RoBERTa"][0]])


@pytest.mark.parametrize(
    ("frame", "count"), [*FRAMES.values(), (SEVERAL, 2)], ids=[*FRAMES, "several"]
)
def test_separators(frame, count):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 2}, "a"))
    library.add_special_tokens(["<s>", "</s>"])
    if frame is not None:
        library.post_processor = frame
    assert separators(Tokenizer(library.to_str())) == count


def test_a_mask_may_stand_for_a_space():
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    library.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True), "</s>"])
    assert mask_takes_space(Tokenizer(library.to_str()))
    assert not mask_takes_space(Tokenizer(library.to_str(), {"mask_id": 2}))
    assert not mask_takes_space(Tokenizer(library.to_str(), {"mask_id": None}))
