"""Noise: how much, where, and what becomes of it; batches of examples; lines with
gaps.
"""

import itertools
import logging
import re
from collections import Counter

import numpy as np
import pytest

from transformer_jax.data.annotated import documents_file
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.denoising import (
    Chunks,
    Corruption,
    CorruptionConfig,
    composition,
    denoising_batches,
    encode_gaps,
    gap_batches,
    noise_mask,
    noise_sizes,
    permuted,
    poisson_lengths,
    sentinel_tokens,
    separates,
    span_corruption,
    text_infilling,
)
from transformer_jax.data.files import DataError
from transformer_jax.data.ragged import Ragged
from transformer_jax.data.streams import Tokens
from transformer_jax.data.text import TextData
from transformer_jax.data.tokenizer_training import KINDS, train_tokenizer
from transformer_jax.data.tokenizers import TokenizerError

T5 = CorruptionConfig()
BART = CorruptionConfig("text_infilling", 0.3, 3.0, permute_sentences=True)
SENTINELS = np.arange(900, 1000)
MASK_ID = 999


def generator(*seed):
    return np.random.default_rng(seed)


def spans_of(mask):
    """Return the lengths of the runs of True in a mask."""
    runs = itertools.groupby(mask.tolist())
    return [len(list(run)) for is_noise, run in runs if is_noise]


def assert_uniform(counts, choices):
    """Assert that all of `choices` were drawn, and about equally often: the statistic
    of Pearson's test is at most 5 standard deviations above its mean.
    """
    assert set(counts) == set(choices)
    expected = counts.total() / len(choices)
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    freedom = len(choices) - 1
    assert statistic <= freedom + 5 * np.sqrt(2 * freedom)


# Noise.


@pytest.mark.parametrize(("total", "parts"), [(6, 3), (5, 1), (4, 4), (7, 2)])
def test_compositions_are_equally_likely(total, parts):
    draw = generator(0)
    drawn = Counter(tuple(composition(total, parts, draw)) for _ in range(3000))
    every = itertools.product(range(1, total + 1), repeat=parts)
    assert_uniform(drawn, [each for each in every if sum(each) == total])


@pytest.mark.parametrize("mean_length", [2.0, 4.0])
def test_masks_with_these_numbers_of_tokens_and_spans_are_equally_likely(mean_length):
    """Of 9 tokens, 4 are noise, in 2 spans or in one."""
    draw = generator(1)
    masks = (tuple(noise_mask(9, 0.45, mean_length, draw)) for _ in range(6000))
    every = (np.array(mask) for mask in itertools.product([False, True], repeat=9))
    spans = 4 / mean_length
    valid = [
        tuple(mask)
        for mask in every
        if mask.sum() == 4 and len(spans_of(mask)) == spans
    ]
    assert len(valid) == {2: 45, 1: 6}[spans]
    assert_uniform(Counter(masks), valid)


@pytest.mark.parametrize(
    ("length", "rate", "mean_length", "noise", "spans"),
    [
        (512, 0.15, 3.0, 77, 26),
        (100, 0.15, 3.0, 15, 5),
        (100, 0.5, 3.0, 50, 17),
        (20, 0.15, 3.0, 3, 1),
        (10, 0.15, 1.0, 2, 2),
        (2, 0.15, 3.0, 1, 1),  # at least one
        (2, 0.99, 3.0, 1, 1),  # and one stays
        (10, 0.9, 1.0, 9, 1),  # no more spans than tokens between them
    ],
)
def test_rate_number_and_length_of_spans(length, rate, mean_length, noise, spans):
    sizes = noise_sizes(np.array([length]), rate, mean_length)
    assert [int(*size) for size in sizes] == [noise, spans]
    masks = [noise_mask(length, rate, mean_length, generator(i)) for i in range(20)]
    for mask in masks:
        assert mask.dtype == bool
        assert mask.shape == (length,)
        assert mask.sum() == noise
        assert len(spans_of(mask)) == spans
    different = {tuple(mask) for mask in masks}
    assert len(different) > (8 if length >= 20 else 1)


def test_the_source_and_the_target_of_the_papers_figure():
    """Raffel et al. 2020, Figure 2: "Thank you <X> me to your party <Y> week"."""
    words = [
        "Thank",
        "you",
        "for",
        "inviting",
        "me",
        "to",
        "your",
        "party",
        "last",
        "week",
        ".",
    ]
    row = np.arange(len(words))
    mask = np.isin(words, ["for", "inviting", "last"])
    source, target = span_corruption(row, mask, SENTINELS[:3])
    names = [*words, *[""] * (900 - len(words)), "<X>", "<Y>", "<Z>"]
    shown = [" ".join(names[i] for i in ids) for ids in (source, target)]
    assert shown == [
        "Thank you <X> me to your party <Y> week .",
        "<X> for inviting <Y> last <Z>",
    ]


def restored(source, target):
    """Put what is missing in a source back, given the target."""
    parts = {}
    for i in target.tolist():
        if i >= 900:
            parts[i] = []
            latest = parts[i]
        else:
            latest.append(i)
    assert not parts[target[-1]]  # the final sentinel
    return [token for i in source.tolist() for token in parts.get(i, [i])]


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("length", [2, 3, 17, 230])
def test_source_and_target_give_the_text_and_have_the_lengths_that_are_planned(
    length, rate
):
    config = CorruptionConfig(rate=rate, mean_length=1.5)
    row = np.arange(length, dtype=np.uint16)
    corruption = Corruption(config, SENTINELS, end=-1)
    (sizes,) = corruption.sizes(np.array([length]))
    assert sizes.max() <= length + 2
    for i in range(20):
        source, target = corruption.example([row], generator(i))
        assert [len(source), len(target)] == sizes.tolist()
        assert source[-1] == target[-1] == -1
        assert restored(source[:-1], target[:-1]) == row.tolist()
        used = [i for i in source.tolist() if i >= 900]
        assert used == SENTINELS[: len(used)].tolist()


def test_noise_at_the_beginning_has_a_sentinel_too():
    mask = np.array([True, True, False, True])
    source, target = span_corruption(np.arange(4), mask, SENTINELS)
    assert source.tolist() == [900, 2, 901]
    assert target.tolist() == [900, 0, 1, 901, 3, 902]


def test_too_few_sentinels_are_refused():
    mask = np.array([False, True, False, True])
    with pytest.raises(ValueError, match=r"2 sentinels for 2 spans .* at least 3"):
        span_corruption(np.arange(4), mask, SENTINELS[:2])


# Text infilling.


def test_lengths_are_those_of_a_poisson_distribution():
    lengths = np.concatenate(
        [poisson_lengths(3000, 3.0, generator(i))[:-1] for i in range(20)]
    )
    n = len(lengths)
    assert lengths.mean() == pytest.approx(3, abs=4 * np.sqrt(3 / n))
    for value, probability in enumerate([0.0498, 0.1494, 0.2240, 0.2240, 0.1680]):
        spread = np.sqrt(n * probability * (1 - probability))
        assert abs((lengths == value).sum() - n * probability) <= 4 * spread


@pytest.mark.parametrize("mean_length", [1.0, 3.0, 20.0])
@pytest.mark.parametrize("total", [0, 1, 2, 9, 50])
def test_lengths_have_the_sum_that_is_asked_for(total, mean_length):
    for i in range(50):
        lengths = poisson_lengths(total, mean_length, generator(i))
        assert lengths.sum() == total
        assert len(lengths) <= total
        assert (lengths >= 0).all()


@pytest.mark.parametrize("mean_length", [1.0, 3.0])
@pytest.mark.parametrize(
    ("length", "rate", "missing"),
    [(1, 0.3, 1), (2, 0.3, 1), (50, 0.3, 15), (201, 0.3, 60), (40, 0.0, 0)],
)
def test_spans_become_one_mask_each(length, rate, missing, mean_length):
    row = np.arange(length, dtype=np.uint16)
    for i in range(30):
        source = text_infilling(row, rate, mean_length, generator(i), MASK_ID)
        kept = source[source != MASK_ID]
        assert len(kept) == length - missing
        assert (np.diff(kept) > 0).all()  # in order, none twice
        assert set(kept.tolist()) <= set(row.tolist())
        assert len(source) <= length


def test_where_spans_are_and_how_many():
    """Tokens are missing equally often, except near the ends, where fewer spans can
    be. There are as many masks as draws until the sum is reached.
    """
    row = np.arange(30)
    sources = [text_infilling(row, 0.3, 3.0, generator(i), 99) for i in range(4000)]
    share = np.mean([~np.isin(row, source) for source in sources], axis=0)
    spread = 4 * np.sqrt(0.3 * 0.7 / len(sources))
    np.testing.assert_allclose(share, share[::-1], atol=1.5 * spread)
    np.testing.assert_allclose(share[5:-5], share[5:-5].mean(), atol=spread)
    assert share.mean() == pytest.approx(0.3)
    masks = [np.sum(source == 99) for source in sources]
    sums = generator(3).poisson(3.0, (4000, 40)).cumsum(axis=1)
    assert np.mean(masks) == pytest.approx(1 + (sums < 9).sum(axis=1).mean(), abs=0.15)


def test_arrangements_are_equally_likely():
    """One of three tokens is missing: a mask in place of each. No mask is inserted,
    because there are no more masks than missing tokens.
    """
    row = np.arange(3)
    drawn = Counter(
        tuple(text_infilling(row, 0.3, 3.0, generator(i), 9)) for i in range(3000)
    )
    assert_uniform(drawn, [(9, 1, 2), (0, 9, 2), (0, 1, 9)])


def test_orders_of_sentences_are_equally_likely():
    sentences = [np.array([0]), np.array([1, 2]), np.array([3])]
    draw = generator(0)
    drawn = Counter(
        tuple(np.concatenate(permuted(sentences, draw))) for _ in range(3000)
    )
    orders = itertools.permutations([(0,), (1, 2), (3,)])
    assert_uniform(drawn, [sum(order, ()) for order in orders])


def test_the_target_of_text_infilling_is_the_text_in_its_order():
    sentences = [np.arange(0, 5), np.arange(5, 12), np.arange(12, 20)]
    corruption = Corruption(BART, np.array([MASK_ID]), end=-1)
    seen = set()
    for i in range(30):
        source, target = corruption.example(sentences, generator(i))
        assert target.tolist() == [*range(20), -1]
        assert source[-1] == -1
        kept = source[(source != MASK_ID) & (source >= 0)]
        assert len(kept) == 14
        number = np.searchsorted([5, 12], kept, side="right")
        seen.add(tuple(dict.fromkeys(number.tolist())))  # one may be missing
        for sentence in range(3):
            assert (np.diff(kept[number == sentence]) > 0).all()
        (most,) = corruption.sizes(np.array([20]))
        assert len(source) <= most[0]
        assert len(target) == most[1]
    assert set(itertools.permutations(range(3))) <= seen


# The config.


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        (T5, {}),
        (BART, {}),
        (CorruptionConfig("text_infilling", 0.0, permute_sentences=True), {}),
        (CorruptionConfig("mlm"), {"objective": "one of span_corruption, text_infill"}),
        (CorruptionConfig(rate=0.0), {"rate": r"must be in \(0, 1\), e.g. 0.15"}),
        (CorruptionConfig(rate=1.0), {"rate": "must be in"}),
        (CorruptionConfig("text_infilling", 0.0), {"rate": "0 only with permuted"}),
        (CorruptionConfig(mean_length=0.5), {"mean_length": "at least 1, e.g. 3.0"}),
        (
            CorruptionConfig(mean_length=float("inf")),
            {"mean_length": "must be at least 1"},
        ),
        (
            CorruptionConfig(permute_sentences=True),
            {"permute_sentences": "must be False with .*: use 'text_infilling'"},
        ),
    ],
)
def test_invalid_choices_are_named(config, problems):
    found = dict(config.problems())
    assert found.keys() == problems.keys()
    for name, rule in problems.items():
        assert re.search(rule, found[name])


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.5, 0.95])
@pytest.mark.parametrize("mean_length", [1.0, 3.0])
def test_there_are_as_many_sentinels_as_the_longest_text_needs(rate, mean_length):
    config = CorruptionConfig(rate=rate, mean_length=mean_length)
    used = []
    for length in range(2, config.room(64) + 1):
        mask = noise_mask(length, rate, mean_length, generator(0))
        used.append(len(spans_of(mask)) + 1)
        sizes = Corruption(config, SENTINELS, 0).sizes(np.array([length]))
        assert sizes.max() <= 64
    assert config.sentinels(64) == max(used)
    assert BART.sentinels(64) == 0


# Chunks.


def test_chunks_hold_every_token_of_a_document_once_and_no_other():
    draw = generator(5)
    numbers = np.repeat(np.arange(40), draw.integers(1, 8, 40))
    sizes = draw.integers(0, 30, len(numbers))  # some are longer than a chunk
    sentences = Ragged(np.arange(sizes.sum()), sizes)
    chunks = Chunks.of(sentences, numbers, room=20)
    of_token = np.repeat(numbers, sizes)
    texts = [np.concatenate(chunks.text(i)) for i in range(len(chunks.starts))]
    assert [len(text) for text in texts] == chunks.sizes.tolist()
    assert all(2 <= len(text) <= 20 for text in texts)
    assert all(len(set(of_token[text])) == 1 for text in texts)
    everything = np.concatenate(texts)
    assert (np.diff(everything) > 0).all()
    # only single tokens between two chunks are left out
    left_out = np.setdiff1d(np.arange(sizes.sum()), everything)
    assert len(left_out) < len(texts) / 5
    assert not np.isin(left_out + 1, left_out).any()
    # as many sentences as fit
    for i, (start, stop) in enumerate(zip(chunks.starts, chunks.stops, strict=True)):
        if i + 1 < len(texts) and chunks.starts[i + 1] == stop:
            following = chunks.text(i + 1)[0]
            same = of_token[following[0]] == of_token[texts[i][0]]
            assert not same or len(texts[i]) + len(following) > 20
        assert stop > start


# Batches.

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "owl", "pig"]


@pytest.fixture
def folder(tmp_path):
    """31 documents of one to five sentences."""
    draw = generator(0)
    for split, count in (("train", 31), ("val", 7)):
        documents = [
            "".join(
                " ".join(draw.choice(WORDS, draw.integers(1, 6))) + "\n"
                for _ in range(draw.integers(1, 6))
            )
            for _ in range(count)
        ]
        (tmp_path / f"{split}.txt").write_text("\n".join(documents))
    return tmp_path


class Data(TextData):
    """The config of a tokenizer with sentinels and the mask."""

    @property
    def special_tokens(self):
        return (*sentinel_tokens(8), "<mask>")


def corpus_of(folder, data_class=Data, **changes):
    keys = {
        "tokenizer": "words",
        "max_length": 16,
        "batch_tokens": 128,
        "rows_multiple": 4,
        "max_buckets": 2,
    }
    data = data_class(directory=str(folder), **(keys | changes))
    stream = Tokens("text", "tokenizer.json", 400, "model.source_vocab_size")
    streams = {"source": stream, "target": stream}
    return Corpus(data, streams, folder / "run", documents_file, ("document",))


@pytest.fixture
def corpus(folder):
    return corpus_of(folder)


def loaded(corpus, split="train", seed=3, numbers=None, config=T5, rows=4):
    batches = denoising_batches(corpus, split, seed, config=config, rows=rows)
    numbers = range(len(batches.plan)) if numbers is None else numbers
    return [batches.load(batches.plan.batch(i)) for i in numbers]


def assert_same(one, other):
    for x, y in zip(one, other, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def examples(batches):
    """Return the source and the target of each example by its number, without end
    ids.
    """
    rows = {}
    for arrays in batches:
        for row in np.flatnonzero(arrays["index"] >= 0):
            number = int(arrays["index"][row])
            assert number not in rows
            sides = []
            for name in ("source", "target"):
                length = arrays[f"{name}_length"][row]
                assert not arrays[name][row, length:].any()
                sides.append(arrays[name][row, : length - 1].tolist())
                assert arrays[name][row, length - 1] == 2
            rows[number] = tuple(sides)
    return rows


def texts_of_documents(corpus, split):
    table = corpus.open(split)
    texts = {}
    columns = (table.column("document"), table.column("text"))
    for document, text in zip(*columns, strict=True):
        texts[document] = f"{texts.get(document, '')} {text}".strip()
    return texts


@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_an_epoch_has_the_text_of_every_document_once(corpus, config):
    tokenizer = corpus.tokenizers["target"]
    sentinels = {tokenizer.id_of(name): i for i, name in enumerate(sentinel_tokens(8))}
    found = examples(loaded(corpus, config=config))
    texts = []
    for number in sorted(found):
        source, target = found[number]
        text = target
        if config is T5:
            numbered = [
                np.array([900 + sentinels[i] if i in sentinels else i for i in ids])
                for ids in (source, target)
            ]
            text = restored(*numbered)
        texts.append(tokenizer.decode(text))
    assert sorted(found) == list(range(len(texts)))
    words = [text for text in texts_of_documents(corpus, "train").values()]
    everything = " ".join(words).split()
    missing = len(everything) - len(" ".join(texts).split())
    assert 0 <= missing < 10  # chunks of one word
    assert any(text in texts for text in words if len(text.split()) > 10)
    assert all(any(text in whole for whole in words) for text in texts)


@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_draws_depend_on_seed_and_number_only(corpus, config):
    """A run that goes on, or one in another process, has the same batches. Another
    epoch has other noise.
    """
    epoch = len(denoising_batches(corpus, "train", 5, config=config, rows=4).plan)
    first = loaded(corpus, "train", 5, range(2 * epoch), config)
    again = loaded(corpus, "train", 5, reversed(range(2 * epoch)), config)
    assert_same(again, first[::-1])
    one = examples(first[:epoch])
    two = examples(first[epoch:])
    assert one.keys() == two.keys()
    longer = [i for i in one if len(one[i][0]) > 6]
    assert sum(one[i] != two[i] for i in longer) > len(longer) / 2
    other = examples(loaded(corpus, "train", 6, range(epoch), config))
    assert sum(one[i] != other[i] for i in longer) > len(longer) / 2


def test_a_restart_draws_the_same(folder):
    before = loaded(corpus_of(folder), numbers=range(12))
    after = loaded(corpus_of(folder), numbers=range(6, 12))
    assert_same(after, before[6:])


def test_a_host_draws_its_rows_as_they_are_in_the_whole_batch(corpus):
    batches = denoising_batches(corpus, "train", 5, config=BART, rows=4)
    for number in range(len(batches.plan)):
        batch = batches.plan.batch(number)
        parts = [
            batches.load(batch._replace(indices=rows))
            for rows in np.split(batch.indices, 2)
        ]
        whole = {
            name: np.concatenate([part[name] for part in parts]) for name in parts[0]
        }
        assert_same([whole], [batches.load(batch)])


def test_evaluation_has_the_same_examples_every_time_at_any_batch_size(corpus):
    runs = [
        examples(loaded(corpus, "val", None, config=BART, rows=rows))
        for rows in (4, 4, 6)
    ]
    assert runs[0] == runs[1] == runs[2]
    batches = denoising_batches(corpus, "val", None, config=BART, rows=4)
    again = [batches.load(batches.plan.batch(i + len(batches.plan))) for i in (0, 1)]
    assert_same(again, [batches.load(batches.plan.batch(i)) for i in (0, 1)])
    assert batches.references == [corpus.sha256("val")]


def test_batches_are_in_buckets_and_have_room_for_their_rows(folder):
    corpus = corpus_of(folder, max_length=32, max_buckets=3, batch_tokens=256)
    batches = denoising_batches(corpus, "train", 0, config=T5, rows=4)
    assert 1 < len(batches.plan.shapes) <= 3
    shapes = {
        (*arrays["source"].shape, arrays["target"].shape[1])
        for arrays in loaded(corpus, seed=0)
    }
    assert shapes == set(batches.plan.shapes)
    assert all(rows * max(s, t) <= 256 for rows, s, t in shapes)


def test_a_baseline_is_given_where_the_target_is_the_text(corpus):
    bart = denoising_batches(corpus, "train", 0, config=BART, rows=4)
    assert 0 < bart.baseline() <= np.log(len(WORDS))
    assert denoising_batches(corpus, "train", 0, config=T5, rows=4).baseline is None


def test_documents_of_one_token_are_left_out_and_nothing_else(folder, caplog):
    (folder / "train.txt").write_text("ant\n\nbee cat\n\ndog\n\neel fox gnu\n")
    corpus = corpus_of(folder)
    with caplog.at_level(logging.INFO):
        found = examples(loaded(corpus, config=BART))
    tokenizer = corpus.tokenizers["target"]
    texts = sorted(tokenizer.decode(target) for _, target in found.values())
    assert texts == ["bee cat", "eel fox gnu"]
    assert "train: 4 documents, 2 chunks; 2 tokens left out" in caplog.text


def test_documents_without_two_tokens_are_refused(folder):
    (folder / "train.txt").write_text("ant\n\nbee\n")
    message = r"train.txt: none of 2 documents in the split train has two tokens"
    with pytest.raises(DataError, match=message):
        loaded(corpus_of(folder))


def test_sentinels_that_the_tokenizer_lacks_are_named(folder):
    corpus = corpus_of(folder, TextData)
    message = (
        r"has no <extra_id_0>, and denoising.objective = 'span_corruption' needs "
        r"2 tokens that stand for missing text, of which it lacks 2: "
        r"lower data.max_length = 16, start from a run of this task, or train"
    )
    with pytest.raises(TokenizerError, match=message):
        loaded(corpus)
    message = r"no <mask>, .*'text_infilling' needs 1 token .*lacks 1: start from a run"
    with pytest.raises(TokenizerError, match=message):
        loaded(corpus, config=BART)


def test_a_tokenizer_may_have_too_few_sentinels(folder):
    corpus = corpus_of(folder, max_length=128, batch_tokens=1024)
    config = CorruptionConfig(rate=0.5, mean_length=1.5)
    message = "no <extra_id_8>, .* needs 43 tokens .* lacks 35"
    with pytest.raises(TokenizerError, match=message):
        loaded(corpus, config=config)


# Sentences of different tokenizers, and lines with gaps.

SPACED = [kind for kind in KINDS if kind not in ("bpe_bytes", "characters")]
LINES = ["ant bee cat. dog", "eel fox. gnu", "hen"]
MARKS = ("<extra_id_0>", "<extra_id_1>", "<mask>")


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_are_joined_by_one_space(kind, tmp_path):
    (tmp_path / "train.txt").write_text("ant bee.\ncat dog.\n\neel.\nfox gnu.\n")
    corpus = corpus_of(tmp_path, tokenizer=kind, max_length=64, batch_tokens=512)
    tokenizer = corpus.tokenizers["target"]
    assert separates(tokenizer) == (kind in SPACED)
    batches = denoising_batches(corpus, "train", 0, config=BART, rows=4)
    arrays = batches.load(batches.plan.batch(0))
    texts = {tokenizer.decode(row) for row in arrays["target"][arrays["index"] >= 0]}
    assert texts == {"ant bee. cat dog.", "eel. fox gnu."}


@pytest.mark.parametrize("kind", KINDS)
def test_marks_in_a_line_become_tokens_and_text_is_as_in_training(kind):
    tokenizer = train_tokenizer(kind, LINES * 3, 300, marks=MARKS)
    ids = [tokenizer.id_of(mark) for mark in MARKS]
    end = tokenizer.eos_id
    lines = ["ant <mask> cat. dog", "eel<extra_id_1> gnu <extra_id_0>", " ", "<mask>"]
    encoded_lines = encode_gaps(lines, tokenizer, end)
    rows = [encoded_lines[i].tolist() for i in range(len(lines))]

    def encoded(text):
        (of_text,) = tokenizer.encode_batch([text])
        return of_text

    space = "" if kind in SPACED else " "
    assert rows == [
        [*encoded("ant"), ids[2], *encoded(f"{space}cat. dog"), end],
        [*encoded("eel"), ids[1], *encoded(f"{space}gnu"), ids[0], *encoded(""), end],
        [*encoded(""), end],
        [*encoded(""), ids[2], *encoded(""), end],
    ]
    whole = [*encoded("ant"), *encoded(f"{space}bee"), *encoded(f"{space}cat. dog")]
    assert tokenizer.decode(whole) == tokenizer.decode(encoded("ant bee cat. dog"))


def test_a_mark_that_the_tokenizer_lacks_is_refused():
    tokenizer = train_tokenizer("words", LINES, 300, marks=MARKS)
    message = "line 2 has <extra_id_7>, which is no token .* 'span_corruption', and"
    with pytest.raises(DataError, match=message):
        encode_gaps(["ant <mask>", "ant <extra_id_7>"], tokenizer, 2)


def test_lines_with_gaps_are_batched_and_cut(corpus, caplog):
    lines = ["ant <extra_id_0> cat", "", "bee " * 30 + "<extra_id_0>"]
    batches = gap_batches(corpus, lines, limit=16, rows=4)
    arrays = [batches.load(batches.plan.batch(i)) for i in range(len(batches.plan))]
    assert {name for batch in arrays for name in batch} == {
        "source",
        "source_length",
        "index",
    }
    lengths = {
        int(i): int(n)
        for batch in arrays
        for i, n in zip(batch["index"], batch["source_length"], strict=True)
        if i >= 0
    }
    assert lengths == {0: 4, 1: 1, 2: 16}
    assert "input, line 3: 32 tokens, cut to model.max_length = 16" in caplog.text
