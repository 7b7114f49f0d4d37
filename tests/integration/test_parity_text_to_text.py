"""A folder of T5 with its tokenizer: texts are answered as in transformers."""

import string

import pytest

import transformer_jax
from helpers.parity import check_loads, need_transformers, random_model
from transformer_jax import conversion
from transformer_jax.workdir import read

transformers, torch = need_transformers()

SIZES = {
    "d_model": 21,
    "d_kv": 5,
    "d_ff": 23,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 7,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
GENERATION = {"num_beams": 3, "max_length": 19, "length_penalty": 1.2}
WORDS = ("translate", "English", "German", "the", "cat", "sees", "dog")
NAME = "T5ForConditionalGeneration"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text-to-text")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -6.0) for letter in string.ascii_letters + ":."]
    pieces += [(f"▁{word}", -3.0) for word in WORDS] + [("s", -4.0)]
    pieces = [*dict(pieces).items()]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in (2, 1, 0)]
    tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=3)
    tokenizer.save_pretrained(folder)
    # as in the released models, there are more rows than pieces
    config = transformers.T5Config(vocab_size=len(pieces) + 5, **SIZES)
    theirs = random_model(transformers, torch, NAME, config, 0, folder)
    with torch.no_grad():  # rows of no piece, which a search here never writes
        theirs.shared.weight[len(pieces) :] = 0
    unused = [[i] for i in [0, *range(len(pieces), config.vocab_size)]]
    theirs.generation_config.update(bad_words_ids=unused, **GENERATION)
    theirs.save_pretrained(folder)
    return folder


def test_a_run_answers_as_transformers_does(folder, tmp_path):
    """The folder becomes a workdir, which becomes a folder again."""
    conversion.to_workdir(conversion.config_for(str(folder)), tmp_path / "run")
    config = read(tmp_path / "run")
    assert (config.task, config.data.joint_tokenizer) == ("sequence_to_sequence", True)
    lines = [
        "translate English to German: the cat sees the dog.",
        "the zoo",
        "dogs  see   cats",
        "é",
    ]
    predictor = transformer_jax.load(str(tmp_path / "run"))
    target = predictor.task.corpus.tokenizers["target"]
    assert (target.pad_id, target.bos_id, target.eos_id) == (0, 0, 1)
    ours = predictor.predict(lines)
    conversion.to_folder(tmp_path / "run", config, str(tmp_path / "back"))
    for theirs in folder, tmp_path / "back":
        tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
        model = check_loads(transformers, NAME, theirs)
        inputs = tokenizer(lines, padding=True, return_tensors="pt")
        assert [row[-1] for row in tokenizer(lines)["input_ids"]] == [1] * len(lines)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs)
        assert (output[:, 0] == 0).all()
        expected = [
            target.decode([i for i in row if i not in (0, 1)])
            for row in output.tolist()
        ]
        assert ours == expected
    assert len(set(ours)) > 1
