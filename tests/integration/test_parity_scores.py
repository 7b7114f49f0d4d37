"""Evaluation, scores and continuations of a converted Llama are those of
transformers, with any kind of tokenizer.
"""

import numpy as np
import pytest

import transformer_jax
from helpers.parity import need_transformers, random_model
from transformer_jax import conversion
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer

transformers, torch = need_transformers()

TEXT = (
    "What is the cat?\n\nThe cat is that  \nwhich it is.\r\n  "
    "It is what the cat is, is it.\n\n\n"
)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 149,
    "pad_token_id": None,
}
KINDS = ["bpe_bytes", "bpe_metaspace", "unigram", "characters"]


class Both:
    """A model and its tokenizer in transformers, and the same as a run."""

    def __init__(self, kind, begin, folder):
        lines = TEXT.splitlines(keepends=True)
        tokenizer = train_tokenizer(kind, lines, 300 if kind == "bpe_bytes" else 40)
        config = transformers.LlamaConfig(**SIZES, vocab_size=tokenizer.size)
        self.model = random_model(
            transformers, torch, "LlamaForCausalLM", config, 3, folder / "theirs"
        )
        tokenizer_files.to_folder(tokenizer, folder / "theirs", begin=begin)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "theirs")
        conversion.to_workdir(
            conversion.config_for(str(folder / "theirs")), folder / "run"
        )
        (folder / "test.txt").write_bytes(TEXT.encode())
        settings = {
            "data.directory": str(folder),
            "data.max_length": 149,
            "data.batch_tokens": 149 * 8,
        }
        self.run = transformer_jax.load(
            folder / "run", settings | {"decoding.max_extra": 9}
        )

    def log_likelihood(self, text, after=0):
        """Return the sum over all tokens of a text but the first, or over those from
        number `after` on.
        """
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = self.model(ids).logits[0, :-1].log_softmax(-1)
        chosen = logits.gather(1, ids[0, 1:, None])[:, 0].double().numpy()
        return chosen[max(after - 1, 0) :].sum()


@pytest.fixture(
    params=[(kind, begin) for kind in KINDS for begin in (False, True)],
    ids=str,
    scope="module",
)
def both(request, tmp_path_factory):
    return Both(*request.param, tmp_path_factory.mktemp("both"))


def test_bits_per_byte_are_those_of_their_loss(both):
    found = both.run.evaluate("test")
    tokens = len(both.tokenizer(TEXT)["input_ids"]) - 1
    assert found["loss"] * tokens == pytest.approx(-both.log_likelihood(TEXT), rel=1e-5)


def test_evaluation_and_score_agree(both):
    """Without a begin id, evaluation does not predict the first token.

    The score leaves it out as the context.
    """
    found = both.run.evaluate("test")
    begun = both.run.config.decoding.prepend_begin
    _, starts, _ = both.run.task.corpus.tokenizers["text"].spans([TEXT])
    if not begun and not (first := starts[0][1]):
        pytest.skip("the first token is no text that could be the context")
    record = (
        {"text": TEXT} if begun else {"context": TEXT[:first], "text": TEXT[first:]}
    )
    (score,) = both.run.predict([record], scored=True)
    total = found["loss"] * score["tokens"]
    assert -score["log_likelihood"] == pytest.approx(total, rel=1e-5)
    assert -score["per_byte"] / np.log(2) == pytest.approx(
        found["bits_per_byte"], rel=1e-5
    )


def test_a_score_counts_the_tokens_after_the_context(both):
    context, text = "What is", " the cat?"
    before = len(both.tokenizer(context)["input_ids"])
    (score,) = both.run.predict([{"context": context, "text": text}], scored=True)
    assert score["log_likelihood"] == pytest.approx(
        both.log_likelihood(context + text, before), rel=1e-5
    )
    assert score["tokens"] == len(both.tokenizer(context + text)["input_ids"]) - before


def test_a_continuation_is_what_their_text_has_after_the_prompt(both):
    prompts = ["What is", "The cat", "It is what "]
    for prompt, found in zip(prompts, both.run.predict(prompts), strict=True):
        ids = both.tokenizer(prompt, return_tensors="pt")["input_ids"]
        # Padding and begin are never written.
        whole = both.model.generate(
            ids,
            do_sample=False,
            max_new_tokens=9,
            pad_token_id=0,
            suppress_tokens=[0, 1],
        )
        text = both.tokenizer.decode(whole[0], skip_special_tokens=True)
        start = both.tokenizer.decode(ids[0], skip_special_tokens=True)
        assert start + found["continuation"] == text
        assert "".join(both.run.stream(prompt)) == found["continuation"]
