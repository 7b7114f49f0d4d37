"""What the JSON of a tokenizer says about special tokens."""

import pytest
import tokenizers
from tokenizers import processors

from transformer_jax.data import tokenizer_frames
from transformer_jax.data.tokenizer_frames import mask_takes_space, separators
from transformer_jax.data.tokenizers import Tokenizer, TokenizerError

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


def with_frame(frame):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 2}, "a"))
    library.add_special_tokens(["<s>", "</s>"])
    if frame is not None:
        library.post_processor = frame
    return Tokenizer(library.to_str())


def template(single):
    ids = {"special_tokens": [*IDS["special_tokens"], ("a", 2)]}
    return processors.TemplateProcessing(single=single, **ids)


@pytest.mark.parametrize(
    ("frame", "tokens"),
    [
        (FRAMES["RoBERTa"][0], ("<s>", "")),
        (SEVERAL, ("<s>", "")),
        (FRAMES["XLM-R"][0], ("<s>", "")),
        (template("$A </s>"), ("", "")),
        (template("$A </s> a"), ("", "a")),
        (template("a $A </s>"), ("a", "")),
    ],
)
def test_tokens_around_one_text(frame, tokens):
    assert tokenizer_frames.frame(with_frame(frame)) == tokens


@pytest.mark.parametrize(
    "frame", [None, template("$A"), template("<s> a $A </s>"), template("$A a </s>")]
)
def test_other_tokens_around_a_text_are_refused(frame):
    with pytest.raises(
        TokenizerError, match=r"supported are one token before it, the "
    ):
        tokenizer_frames.frame(with_frame(frame))


@pytest.mark.parametrize(
    ("frame", "count"), [*FRAMES.values(), (SEVERAL, 2)], ids=[*FRAMES, "several"]
)
def test_separators(frame, count):
    assert separators(with_frame(frame)) == count


def test_a_mask_may_stand_for_a_space():
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    library.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True), "</s>"])
    assert mask_takes_space(Tokenizer(library.to_str()))
    assert not mask_takes_space(Tokenizer(library.to_str(), {"mask_id": 2}))
    assert not mask_takes_space(Tokenizer(library.to_str(), {"mask_id": None}))
