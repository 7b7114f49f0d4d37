"""Masks: how many tokens, which ones and what they become; batches of examples;
blanks in text to predict from.
"""

import logging
import re

import numpy as np
import pytest

from helpers.processes import in_a_new_process
from transformer_jax.data.annotated import documents_file
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.masking import (
    MaskingConfig,
    Specials,
    assemble,
    blank_batches,
    document_batches,
    encode_blanks,
    mask,
    most_masked,
    next_tokens,
)
from transformer_jax.data.segments import Segments
from transformer_jax.data.streams import Tokens
from transformer_jax.data.text import TextData
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.data.tokenizers import TokenizerError

PAPER = MaskingConfig()
MASK_ID, REPLACEMENTS = 4, np.arange(5, 64)
T = 131
LENGTHS = np.array([131, 97, 23, 7, 4, 0])


def near(count, total, probability):
    return abs(count - total * probability) <= 4 * np.sqrt(
        total * probability * (1 - probability)
    )


def masked(times, config=PAPER, continues=None):
    """Return (text, candidates, masked) of `times` draws; text has [CLS] 2, [SEP] 3
    and padding 0.
    """
    draw = np.random.default_rng(7)
    lengths = np.tile(LENGTHS, times)[:, None]
    text = np.where(np.arange(T) < lengths, draw.integers(5, 64, (len(lengths), T)), 0)
    text[:, 0] = np.where(lengths[:, 0], 2, 0)
    candidates = text >= 5
    separators = np.arange(T) == np.maximum(lengths // 2, 1)
    separators |= np.arange(T) == lengths - 1
    text = np.where(separators & candidates, 3, text)
    draws = [np.random.default_rng((7, row)) for row in range(len(text))]
    return (
        text,
        text >= 5,
        mask(text, text >= 5, draws, config, MASK_ID, REPLACEMENTS, continues),
    )


def places(found):
    """Return (rows, columns) of all predictions."""
    rows, at = np.nonzero(np.arange(found.positions.shape[1]) < found.counts[:, None])
    return rows, found.positions[rows, at]


def test_15_percent_of_the_tokens_are_chosen_at_least_one_and_none_twice():
    text, candidates, found = masked(30)
    assert found.positions.shape == (len(text), 20) == (len(text), most_masked(T, 0.15))
    available = candidates.sum(axis=1)
    assert sorted(set(available)) == [0, 1, 4, 20, 94, 128]
    assert found.counts.tolist() == [
        {0: 0, 1: 1, 4: 1, 20: 3, 94: 14, 128: 19}[n] for n in available
    ]
    rows, columns = places(found)
    assert (
        len(set(zip(rows.tolist(), columns.tolist(), strict=True)))
        == len(rows)
        == found.counts.sum()
    )
    assert candidates[rows, columns].all()
    labels = found.labels[np.arange(found.labels.shape[1]) < found.counts[:, None]]
    np.testing.assert_array_equal(labels, text[rows, columns])
    same = np.ones_like(candidates)
    same[rows, columns] = False
    np.testing.assert_array_equal(found.text[same], text[same])
    rest = np.arange(found.positions.shape[1]) >= found.counts[:, None]
    assert not found.positions[rest].any()
    assert not found.labels[rest].any()
    # Every place is equally likely: in rows of full length, those before the middle as
    # often as those after it.
    full = rows % len(LENGTHS) == 0
    before = candidates[0, : T // 2].sum()
    assert near((columns[full] < T // 2).sum(), full.sum(), before / available[0])


def test_80_percent_are_masks_10_percent_random_and_10_percent_themselves():
    text, _, found = masked(500)
    rows, columns = places(found)
    old, new = text[rows, columns], found.text[rows, columns]
    total = len(rows)
    assert total > 10_000
    assert near((new == MASK_ID).sum(), total, 0.8)
    # one of 59 draws is the token itself
    assert near(((new != MASK_ID) & (new != old)).sum(), total, 0.1 * 58 / 59)
    assert near((new == old).sum(), total, 0.1 + 0.1 / 59)
    drawn = new[(new != MASK_ID) & (new != old)]
    assert set(drawn.tolist()) == set(REPLACEMENTS.tolist())
    assert all(near((drawn == i).sum(), len(drawn), 1 / 59) for i in REPLACEMENTS)


@pytest.mark.parametrize(
    ("mask_share", "random_share", "expected"),
    [(1.0, 0.0, "mask"), (0.0, 1.0, "random")],
)
def test_shares_of_one_kind_only(mask_share, random_share, expected):
    text, _, found = masked(
        5, MaskingConfig(mask_share=mask_share, random_share=random_share)
    )
    new = found.text[places(found)]
    assert ((new == MASK_ID) == (expected == "mask")).all()
    assert (new == text[places(found)]).mean() < 0.1


def test_all_pieces_of_a_word_are_chosen_or_none():
    """Pieces 40 … 63 continue a word.

    A segment that begins with one has it as a word of its own.
    """
    continues = np.arange(64) >= 40
    text, candidates, found = masked(
        40, MaskingConfig(rate=0.3, whole_word=True), continues
    )
    limits = np.maximum(np.rint(0.3 * candidates.sum(axis=1)), 1)
    chosen = np.zeros_like(candidates)
    chosen[places(found)] = True
    sizes = []
    for b in range(len(text)):
        words, before = [], False
        for t in range(T):
            if candidates[b, t]:
                if before and continues[text[b, t]]:
                    words[-1].append(t)
                else:
                    words.append([t])
            before = candidates[b, t]
        assert all(len({bool(chosen[b, t]) for t in word}) == 1 for word in words)
        smallest = min(
            (len(word) for word in words if not chosen[b, word[0]]), default=T
        )
        # no further word would fit
        assert limits[b] - smallest < chosen[b].sum() <= limits[b] or not words
        sizes += [len(word) for word in words if chosen[b, word[0]]]
    assert set(sizes) >= {1, 2, 3}


def test_layout_of_segments():
    """Row by row: [CLS] first [SEP] second [SEP], [CLS] first [SEP], a filler row."""
    rows = [
        Segments(np.array([11, 12]), np.array([13]), True),
        Segments(np.array([14]), None, False),
        None,
    ]
    text, sizes, seconds, candidates = assemble(rows, 7, 2, 3)
    assert text.tolist() == [[2, 11, 12, 3, 13, 3, 0], [2, 14, 3, 0, 0, 0, 0], [0] * 7]
    assert sizes.tolist() == [6, 3, 0]
    assert seconds.tolist() == [4, 3, 0]
    assert candidates.tolist() == [
        [0, 1, 1, 0, 1, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0] * 7,
    ]


def test_a_causal_model_predicts_every_next_token():
    found = next_tokens(
        np.array([[2, 11, 12, 3], [2, 3, 0, 0], [0, 0, 0, 0]]), np.array([4, 2, 0])
    )
    assert found.positions.tolist() == [[0, 1, 2]] * 3
    assert found.labels[0].tolist() == [11, 12, 3]
    assert found.labels[1, 0] == 3
    assert found.counts.tolist() == [3, 1, 0]


WORDS = [
    "ant",
    "bee",
    "cat",
    "dog",
    "eel",
    "fox",
    "gnu",
    "hen",
    "owl",
    "pig",
    "ram",
    "yak",
]


@pytest.fixture
def corpus(tmp_path):
    """A corpus of 31 documents of one to five sentences, and a tokenizer whose
    tokens are the words.
    """
    draw = np.random.default_rng(0)
    for split, count in (("train", 31), ("val", 7)):
        documents = [
            "".join(
                " ".join(draw.choice(WORDS, draw.integers(1, 6))) + "\n"
                for _ in range(draw.integers(1, 6))
            )
            for _ in range(count)
        ]
        (tmp_path / f"{split}.txt").write_text("\n".join(documents))
    data = TextData(
        directory=str(tmp_path),
        tokenizer="bert",
        max_length=16,
        batch_tokens=128,
        rows_multiple=4,
        max_buckets=2,
    )
    stream = {"text": Tokens("text", "tokenizer.json", 128, "model.vocab_size")}
    return Corpus(data, stream, tmp_path / "run", documents_file, ("document",))


def loaded(corpus, split, seed, numbers=None, config=PAPER, causal=False):
    batches = document_batches(
        corpus, split, seed, config=config, causal=causal, rows=4
    )
    return [
        batches.load(batches.plan.batch(i))
        for i in (range(len(batches.plan)) if numbers is None else numbers)
    ]


def assert_same(one, other):
    for x, y in zip(one, other, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def test_an_example_of_a_batch_is_a_masked_part_of_its_documents(corpus):
    tokenizer = corpus.tokenizers["text"]
    table = corpus.open("train")
    texts = {}
    for text, document in zip(
        table.column("text"), table.column("document"), strict=True
    ):
        texts[document] = f"{texts.get(document, '')} {text}"
    for arrays in loaded(corpus, "train", 3, range(30)):
        for b in range(len(arrays["text"])):
            n, length, second = (
                arrays["masked"][b],
                arrays["text_length"][b],
                arrays["second"][b],
            )
            if arrays["index"][b] < 0:
                assert not n
                assert not length
                continue
            ids = arrays["text"][b].copy()
            ids[arrays["positions"][b, :n]] = arrays["label"][b, :n]
            words = tokenizer.tokens(ids[:length])
            first, other = words[1 : second - 1], words[second : length - 1]
            assert words == [
                "[CLS]",
                *first,
                "[SEP]",
                *([*other, "[SEP]"] if arrays["paired"][b] else ()),
            ]
            found = [
                {
                    document
                    for document, text in texts.items()
                    if f" {' '.join(part)} " in f"{text} "
                }
                for part in ((first, other) if arrays["paired"][b] else (first,))
            ]
            assert all(found)
            assert n == max(1, round(0.15 * (len(first) + len(other))))
            if arrays["follows"][b]:
                assert arrays["paired"][b]
                assert found[0] & found[1]


def test_draws_depend_on_seed_and_number_only(corpus):
    """A new process, or a run that goes on, has the same batches.

    Another epoch has other masks and pairs.
    """
    batches = document_batches(corpus, "train", 5, config=PAPER, causal=False, rows=4)
    epoch = len(batches.plan)
    first = loaded(corpus, "train", 5, range(2 * epoch))
    assert_same(loaded(corpus, "train", 5, reversed(range(2 * epoch))), first[::-1])
    by_chunk = [
        {int(i): b for b in part for i in b["index"] if i >= 0}
        for part in (first[:epoch], first[epoch:])
    ]
    assert by_chunk[0].keys() == by_chunk[1].keys()
    rows = [
        {
            i: [
                b[name][list(b["index"]).index(i)].tolist()
                for name in ("text", "follows")
            ]
            for i, b in part.items()
        }
        for part in by_chunk
    ]
    assert len(rows[0]) == len({i for b in first[:epoch] for i in b["index"] if i >= 0})
    assert sum(rows[0][i][0] != rows[1][i][0] for i in rows[0]) > len(rows[0]) / 2
    assert any(rows[0][i][1] != rows[1][i][1] for i in rows[0])
    other = loaded(corpus, "train", 6, range(epoch))
    assert any(
        x["text"].shape != y["text"].shape or (x["text"] != y["text"]).any()
        for x, y in zip(first, other, strict=False)
    )


def test_a_host_draws_its_rows_as_they_are_in_the_whole_batch(corpus):
    batches = document_batches(corpus, "train", 5, config=PAPER, causal=False, rows=4)
    for number in range(len(batches.plan)):
        batch = batches.plan.batch(number)
        parts = [
            batches.load(batch._replace(indices=rows))
            for rows in np.split(batch.indices, 2)
        ]
        assert_same(
            [{name: np.concatenate([x[name] for x in parts]) for name in parts[0]}],
            [batches.load(batch)],
        )


def test_evaluation_has_the_same_examples_at_any_batch_size(corpus):
    found = []
    for rows in (4, 6):
        batches = document_batches(
            corpus, "val", None, config=PAPER, causal=False, rows=rows
        )
        arrays = [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]
        found.append(
            {
                int(i): [a[n][b].tolist() for n in a]
                for a in arrays
                for b, i in enumerate(a["index"])
                if i >= 0
            }
        )
    assert len(found[0]) > 7
    assert found[0] == found[1]


def test_a_new_process_draws_the_same(corpus, tmp_path):
    program = f"""
import numpy as np
from transformer_jax.data.annotated import documents_file
from transformer_jax.data.masking import MaskingConfig, document_batches
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.streams import Tokens
from transformer_jax.data.text import TextData

data = TextData(
    directory={str(tmp_path)!r},
    tokenizer="bert",
    max_length=16,
    batch_tokens=128,
    rows_multiple=4,
    max_buckets=2,
)
stream = {{"text": Tokens("text", "tokenizer.json", 128, "model.vocab_size")}}
corpus = Corpus(data, stream, {str(tmp_path / "run")!r}, documents_file, ("document",))
batches = document_batches(
    corpus, "train", 5, config=MaskingConfig(), causal=False, rows=4
)
np.savez({str(tmp_path / "batch.npz")!r}, **batches.load(batches.plan.batch(11)))
"""
    (here,) = loaded(corpus, "train", 5, [11])
    in_a_new_process(program)
    assert_same([dict(np.load(tmp_path / "batch.npz"))], [here])


def test_a_split_is_the_same_every_time_and_covers_every_chunk(corpus):
    first = loaded(corpus, "val", None)
    assert_same(loaded(corpus, "val", None), first)
    indices = np.concatenate([arrays["index"] for arrays in first])
    assert sorted(indices[indices >= 0]) == list(range(max(indices) + 1))


def test_without_next_sentence_there_are_single_segments(corpus):
    for arrays in loaded(
        corpus, "val", None, config=MaskingConfig(next_sentence=False)
    ):
        assert not arrays["paired"].any()
        assert not arrays["follows"].any()
        np.testing.assert_array_equal(arrays["second"], arrays["text_length"])


def test_causal_batches_are_not_masked(corpus):
    config = MaskingConfig(next_sentence=False)
    for arrays in loaded(corpus, "val", None, config=config, causal=True):
        for text, length, label, n in zip(
            *(arrays[k] for k in ("text", "text_length", "label", "masked")),
            strict=True,
        ):
            assert n == max(length - 1, 0)
            assert label[:n].tolist() == text[1:length].tolist()
            assert MASK_ID not in text


def test_long_sentences_are_cut_with_a_warning(corpus, tmp_path, caplog):
    (tmp_path / "long.txt").write_text("ant\nbee\n\n" + "cat " * 14 + "\ndog\neel\n")
    arrays = loaded(corpus, "long", None)
    assert "long: 1 of 5 sentences cut to 13 tokens" in caplog.text
    assert max(x["text_length"].max() for x in arrays) == 15  # without a second segment


def test_counts_are_logged(corpus, tmp_path, caplog):
    (tmp_path / "few.txt").write_text("ant\nbee\n\ncat\ndog\n\neel\n")
    with caplog.at_level(logging.INFO):
        loaded(corpus, "few", None)
    assert "few: 3 documents, 3 chunks, 2 with pairs" in caplog.text


def test_blanks():
    tokenizer = train_tokenizer("bert", [" ".join(WORDS)] * 3, 64)
    lines = ["ant [MASK] bee", "[MASK][MASK]", "", "cat[MASK]", "a [mask]"]
    rows = encode_blanks(lines, tokenizer)
    tokens = [tokenizer.tokens(rows[i]) for i in range(len(lines))]
    assert tokens[:4] == [
        ["[CLS]", "ant", "[MASK]", "bee", "[SEP]"],
        ["[CLS]", "[MASK]", "[MASK]", "[SEP]"],
        ["[CLS]", "[SEP]"],
        ["[CLS]", "cat", "[MASK]", "[SEP]"],
    ]
    assert "[MASK]" not in tokens[4]


@pytest.mark.parametrize("causal", [False, True])
def test_places_of_blanks(corpus, caplog, causal):
    """A causal model predicts a token at the place before it.

    Blanks beyond the limit are lost.
    """
    lines = [
        "ant [MASK] bee [MASK]",
        "ant",
        "[MASK]",
        "[MASK] " + "ant " * 9 + "[MASK]",
    ]
    batches = blank_batches(corpus, lines, causal=causal, limit=8, rows=4)
    assert batches.records == lines
    (arrays,) = (batches.load(batches.plan.batch(i)) for i in range(len(batches.plan)))
    assert arrays["masked"].tolist() == [2, 0, 1, 1]
    expected = np.array([[2, 4], [0, 0], [1, 0], [1, 0]])
    np.testing.assert_array_equal(arrays["positions"], np.maximum(expected - causal, 0))
    np.testing.assert_array_equal(arrays["second"], arrays["text_length"])
    assert "input, line 4: 13 tokens, cut to model.max_length = 8" in caplog.text


def test_a_tokenizer_without_masks_is_refused():
    plain = train_tokenizer("wordpiece", ["ant bee"], 64)
    with pytest.raises(
        TokenizerError, match=r"has no \[MASK\], and .* set data\.tokenizer = 'bert'"
    ):
        Specials.of(plain)
    bare = train_tokenizer("bert", ["ant bee"], 64)
    bare.bos_id = bare.mask_id = None
    with pytest.raises(TokenizerError, match=r"has no \[CLS\] and no \[MASK\], "):
        Specials.of(bare)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rate", 0.0, r"must be in \(0, 1\)"),
        ("rate", 1.0, r"must be in \(0, 1\)"),
        ("mask_share", 1.2, r"must be in \[0, 1\]"),
        ("short_rate", -0.1, r"must be in \[0, 1\]"),
        ("random_share", 0.21, r"must be at most 1 - mask_share = 0\.2"),
    ],
)
def test_invalid_choices(field, value, message):
    problems = dict(MaskingConfig(**{field: value}).problems())
    assert re.search(message, problems[field])
    assert not list(PAPER.problems())
