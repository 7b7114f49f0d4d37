"""Text after a prompt, and ids of a text after its context."""

import pytest

from helpers.layouts import LAYOUTS, SENTENCE
from transformer_jax.data.continuations import Prompt, encode_pairs
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"bert"}))
def test_a_prompt_and_its_continuation_are_the_whole_text(layout):
    tokenizer = LAYOUTS[layout]
    (ids,) = tokenizer.encode_batch([SENTENCE])
    for count in range(1, len(ids)):
        continuation = Prompt(tokenizer, ids[:count]).continuation(ids[count:])
        assert tokenizer.decode(ids[:count]) + continuation == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_after_the_prompt_has_its_space(kind):
    tokenizer = LAYOUTS[kind]
    start, whole = tokenizer.encode_batch(["the king", "the king of France"])
    assert Prompt(tokenizer, start).continuation(whole[len(start) :]).startswith(" of")


class Joining:
    """A decoder that writes "don ' t" as "don't"."""

    bos_id = eos_id = pad_id = None

    def decode(self, ids):
        return " ".join(["I", "don", "'", "t", "know"][i] for i in ids).replace(
            " ' t", "'t"
        )


def test_a_continuation_that_changes_the_end_of_the_prompt_starts_there():
    assert Prompt(Joining(), [0, 1]).continuation([2, 3]) == "'t"
    assert Prompt(Joining(), [0, 1, 2]).continuation([3, 4]) == "'t know"


def test_special_ids_of_the_prompt_end_nothing():
    """GPT-2 has one id for begin and end."""
    tokenizer = LAYOUTS["bpe_bytes"]
    (ids,) = tokenizer.encode_batch([" dead"])
    assert (
        Prompt(tokenizer, [tokenizer.eos_id, *ids]).continuation(
            [*ids, tokenizer.eos_id, *ids]
        )
        == " dead"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ids_of_a_pair_are_those_of_the_whole_text(layout):
    tokenizer, cuts = LAYOUTS[layout], (3, 8, 11, 30)
    contexts, texts = [SENTENCE[:cut] for cut in cuts], [SENTENCE[cut:] for cut in cuts]
    ids, first = encode_pairs(tokenizer, contexts, texts)
    (whole,) = tokenizer.encode_batch([SENTENCE])
    assert [row.tolist() for row in ids] == [whole] * 4
    if layout in KINDS:  # the pieces of others span words
        assert first.tolist() == [len(row) for row in tokenizer.encode_batch(contexts)]


@pytest.fixture(scope="module")
def pieces():
    """Return a tokenizer with the pieces "▁the", "▁king" and "▁"."""
    return train_tokenizer("bpe_metaspace", ["the king"] * 9, 40)


@pytest.mark.parametrize(
    ("context", "text", "before", "after"),
    [
        ("the", " king", ["▁the"], ["▁king"]),
        # of the context, only a space is in the token
        ("the ", "king", ["▁the"], ["▁king"]),
        # the token belongs to the context
        ("the ki", "ng the", ["▁the", "▁king"], ["▁the"]),
        ("the ki", "ng", ["▁the"], ["▁king"]),  # unless the text has no other
        ("the king", "", ["▁the", "▁king"], []),
        ("", "the", [], ["▁the"]),
    ],
)
def test_a_token_across_the_place_between_context_and_text(
    pieces, context, text, before, after
):
    ids, (first,) = encode_pairs(pieces, [context], [text])
    tokens = pieces.tokens(ids[0])
    assert (tokens[:first], tokens[first:]) == (before, after)
