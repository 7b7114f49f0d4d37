"""Records to score: their fields, windows and parts."""

import pathlib
import tracemalloc

import tokenizers as hugging_face

from transformer_jax.data.corpus import Corpus
from transformer_jax.data.running_text import RunningTextData
from transformer_jax.data.scoring import score, scored_batches
from transformer_jax.data.streams import Tokens
from transformer_jax.data.tokenizers import Tokenizer


def test_a_text_of_several_parts():
    parts = [
        {"log_likelihood": -1.5, "tokens": 3},
        {"log_likelihood": -2.5, "tokens": 5},
    ]
    assert score(parts, 16) == {
        "log_likelihood": -4.0,
        "tokens": 8,
        "per_token": -0.5,
        "per_byte": -0.25,
    }


def corpus_of(
    tokenizer: hugging_face.Tokenizer, folder: pathlib.Path, length: int = 8
) -> Corpus:
    """Return a corpus without files, whose tokenizer splits text into characters."""
    tokenizer.pre_tokenizer = hugging_face.pre_tokenizers.Split(
        hugging_face.Regex(r"[\s\S]"), "isolated"
    )
    Tokenizer(tokenizer.to_str()).save(folder / "tokenizer.json")
    data = RunningTextData(directory=str(folder), max_length=length, batch_tokens=64)
    stream = Tokens(
        "text", "tokenizer.json", tokenizer.get_vocab_size(), "model.vocab_size"
    )
    return Corpus(data, {"text": stream}, folder, None)


def of_characters(*characters: str) -> hugging_face.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(("<unk>", *characters))}
    return hugging_face.Tokenizer(
        hugging_face.models.WordLevel(vocabulary, unk_token="<unk>")
    )


def test_a_text_with_a_context_needs_no_end_id(tmp_path):
    """openai-gpt's tokenizer has none."""
    corpus = corpus_of(of_characters("a", "b"), tmp_path)
    batches = scored_batches(
        corpus, "text", [{"context": "ab", "text": "ba"}], limit=8, rows=1
    )
    assert batches.load(batches.plan.batch(0))["target"][0, :3].tolist() == [2, 2, 1]


def test_a_choice_has_no_space_that_is_not_in_it(tmp_path):
    """The tokenizer puts "▁" before a text, but not between context and choice."""
    tokenizer = of_characters("▁", "a", "b")
    tokenizer.normalizer = hugging_face.normalizers.Sequence(
        [
            hugging_face.normalizers.Prepend("▁"),
            hugging_face.normalizers.Replace(" ", "▁"),
        ]
    )
    corpus = corpus_of(tokenizer, tmp_path)
    record = {"context": "ab", "choices": ["ba", " ba"]}
    batches = scored_batches(corpus, "text", [record], limit=8, rows=2)
    scored = []
    for i in range(len(batches.plan)):
        batch = batches.load(batches.plan.batch(i))
        for row, counted in zip(batch["target"], batch["counted"] > 0, strict=True):
            scored.append(corpus.tokenizers["text"].tokens(row[counted]))
    assert sorted(filter(None, scored)) == [["b", "a"], ["▁", "b", "a"]]


def test_joining_a_record_costs_the_same_among_many(tmp_path):
    """A search through all records would allocate arrays of their number."""
    corpus = corpus_of(of_characters("a", "b"), tmp_path)

    def allocated(count: int) -> int:
        records = [{"context": "a", "choices": ["a", "b"]}] * count
        join = scored_batches(corpus, "text", records, limit=8, rows=2).join
        assert join is not None
        parts = [{"log_likelihood": -1.0, "tokens": 1}] * 2
        join(0, parts)
        tracemalloc.start()
        try:
            join(count - 1, parts)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert allocated(2_000) < allocated(100) + 1_000
