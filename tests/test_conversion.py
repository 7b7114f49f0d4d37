"""scripts/convert.py in both directions, and the other scripts with its workdirs."""

import json
import resource

import numpy as np
import pytest
import tokenizers

import transformer_jax
from helpers.abusing import refused, unharmed
from helpers.bert_folders import (
    MASKED_LM,
    PRETRAINING,
    D,
    drawn,
    numbered,
    save,
    shapes,
)
from helpers.corpus import write_corpus
from helpers.forked import script
from helpers.gpt_folders import LLAMA, llama_shapes
from helpers.gpt_folders import save as save_gpt
from transformer_jax import conversion
from transformer_jax.config import ConfigError
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.data.tokenizers import TokenizerError
from transformer_jax.files import OutputError
from transformer_jax.interop.tensors import Tensors
from transformer_jax.workdir import read

TAGS = ["O", "B-LOC", "I-LOC"]

# Class: its tensors, keys of config.json, our task, keys of our config, a record, and a
#     field of its prediction.
KINDS = {
    "BertForPreTraining": (
        PRETRAINING,
        {},
        "bert_pretraining",
        {"masking.next_sentence": True},
        {"text": "ek [MASK]"},
        "masks",
    ),
    "BertForMaskedLM": (
        {name: x for name, x in shapes().items() if "pooler" not in name} | MASKED_LM,
        {},
        "bert_pretraining",
        {"masking.next_sentence": False},
        {"text": "ek [MASK]"},
        "masks",
    ),
    "BertForSequenceClassification": (
        shapes(("classifier", (3, D))),
        numbered(["bad", "fair", "good"]),
        "classification",
        {"data.labels": ("bad", "fair", "good")},
        {"sentence": "ek at"},
        "label",
    ),
    "regression": (
        shapes(("classifier", (1, D))),
        {
            "architectures": ["BertForSequenceClassification"],
            "problem_type": "regression",
            **numbered(["score"]),
        },
        "regression",
        {},
        {"sentence": "ek at"},
        "value",
    ),
    "BertForTokenClassification": (
        {
            name: x
            for name, x in shapes(("classifier", (3, D))).items()
            if "pooler" not in name
        },
        numbered(TAGS),
        "tagging",
        {"data.types": ("LOC",), "data.scheme": "iob2"},
        {"words": "ek at"},
        "tags",
    ),
    "BertForQuestionAnswering": (
        {
            name: x
            for name, x in shapes(("qa_outputs", (2, D))).items()
            if "pooler" not in name
        },
        {},
        "question_answering",
        {},
        {"question": "ek", "context": "at ek ok"},
        "answer",
    ),
    "BertForMultipleChoice": (
        shapes(("classifier", (1, D))),
        {},
        "multiple_choice",
        {},
        None,
        "label",
    ),
}


def theirs(kind, folder):
    """Write a folder whose model has 211 positions: question answering has no room
    for much less.
    """
    tensors, keys, *_ = KINDS[kind]
    tensors = tensors | {"bert.embeddings.position_embeddings.weight": (211, D)}
    return save(
        folder,
        drawn(tensors),
        **{"architectures": [kind], **keys, "max_position_embeddings": 211},
    )


# Heads that others cover: this one is a part of BertForPreTraining's, and these are
# classifiers with one output.
SIMILAR = {"BertForMaskedLM", "BertForMultipleChoice", "regression"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in SIMILAR))
        for kind in KINDS
    ],
)
def test_there_and_back(tmp_path, kind):
    _, _, task, keys, record, field = KINDS[kind]
    folder, run, back = (
        theirs(kind, tmp_path / "theirs"),
        tmp_path / "run",
        tmp_path / "back",
    )
    config = conversion.config_for(str(folder))
    conversion.to_workdir(config, run)
    stored = read(run)
    assert stored.task == task
    for key, value in keys.items():
        section, name = key.split(".")
        assert stored[section][name] == value
    predictor = transformer_jax.load(str(run))
    assert predictor.step == 0
    if record is not None:
        assert field in predictor.predict([record])[0]
    conversion.to_folder(run, stored, str(back))
    ours, original = Tensors(back), Tensors(folder)
    assert set(ours) == set(original)
    for name in original:
        np.testing.assert_array_equal(ours[name], original[name], err_msg=name)
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folder, back)
    )
    assert {key: after[key] for key in before if key != "id2label"} == {
        key: value for key, value in before.items() if key != "id2label"
    }
    assert (back / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with the corpus, a Hugging Face folder and the workdir that the script
    has made of it.
    """
    root = tmp_path_factory.mktemp("convert")
    write_corpus(root / "data")
    (root / "text").touch()
    (root / "half").mkdir()
    (root / "half" / "config.json").write_text('{"model_type": "be')
    labels = numbered(["even", "odd"])
    tensors = drawn(shapes(("classifier", (2, D))))
    save(
        root / "theirs",
        tensors,
        architectures=["BertForSequenceClassification"],
        **labels,
    )
    arguments = (
        "--from_huggingface=theirs",
        "--workdir=run",
        "--config.data.directory=data",
    )
    result = script("convert", *arguments, cwd=root)
    assert (result.returncode, result.stdout) == (0, b""), result.stderr.decode()
    assert b"run is a workdir with the task classification" in result.stderr
    return root


def test_the_scripts_accept_the_workdir(place):
    result = script("evaluate", "--workdir=run", cwd=place)
    scores = json.loads(result.stdout)
    assert (scores["step"], scores["examples"]) == (0, 7)
    assert 0 <= scores["accuracy"] <= 1
    result = script("predict", "--workdir=run", cwd=place, stdin=b"ek at\n\n")
    first, second = map(json.loads, result.stdout.decode().splitlines())
    assert {first["label"], second["label"]} <= {"even", "odd"}
    (place / "in.txt").write_text("ek at\n")
    result = script(
        "attention_report",
        "--workdir=run",
        "--input=in.txt",
        "--output=report.html",
        cwd=place,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert "##k" in (place / "report.html").read_text()


def test_the_script_writes_a_folder(place):
    result = script("convert", "--workdir=run", "--to_huggingface=back", cwd=place)
    assert (result.returncode, result.stdout) == (0, b""), result.stderr.decode()
    assert (
        b"back is a Hugging Face folder with a BertForSequenceClassification, of step 0"
        in result.stderr
    )
    assert (place / "back" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--workdir=new",),
            "give one of --from_huggingface=FOLDER, --to_huggingface=FOLDER and",
        ),
        (
            ("--workdir=run", "--from_huggingface=theirs", "--to_huggingface=new"),
            "give one of",
        ),
        (
            ("--workdir=run", "--to_huggingface=new", "--from_peft=adapter"),
            "--from_peft needs its base: add --from_huggingface=FOLDER",
        ),
        (
            ("--workdir=run", "--from_huggingface=theirs"),
            "run has checkpoints: choose another --workdir",
        ),
        (
            ("--workdir=new", "--from_huggingface=none"),
            "none/config.json cannot be read: No such file or direc",
        ),
        (
            ("--workdir=new", "--from_huggingface=run"),
            "run is not a Hugging Face folder: its config.json nam",
        ),
        (
            ("--workdir=new", "--from_huggingface=half"),
            "half/config.json is not a JSON object (Unterminated string",
        ),
        (("--workdir=none", "--to_huggingface=new"), "none is not the folder of a run"),
        (
            ("--workdir=run", "--to_huggingface=theirs"),
            "theirs already has a config.json: name another folder",
        ),
        (
            ("--workdir=run", "--to_huggingface=text"),
            "the folder text cannot be made: File exists. Name a folder els",
        ),
        (
            ("--workdir=run", "--to_huggingface=gs://bucket/a"),
            "gs://bucket/a: models are written to local folders",
        ),
        (
            ("--workdir=new", "--from_huggingface=theirs", "--config.model.d_ff=29"),
            "d_ff: 23 there, 29 here",
        ),
    ],
)
def test_abuses(place, arguments, words):
    with unharmed(place, new=("new",)):
        refused(script("convert", *arguments, cwd=place), words)


def test_a_model_that_transformers_does_not_have(place, tmp_path):
    with pytest.raises(ConfigError, match="parameters of another model"):
        conversion.to_folder(place / "run", _changed(place), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_that_cannot_be_written(tmp_path):
    """The model is not written either, and the folder is free for another attempt."""
    theirs("BertForSequenceClassification", tmp_path / "theirs")
    (tmp_path / "theirs" / "vocab.txt").unlink()
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[CLS]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]")
    )
    library.add_special_tokens(["[CLS]", "[UNK]"])
    library.save(str(tmp_path / "theirs" / "tokenizer.json"))
    conversion.to_workdir(
        conversion.config_for(str(tmp_path / "theirs")), tmp_path / "run"
    )
    with pytest.raises(
        TokenizerError, match="The tokenizer has no end id to put around a text"
    ):
        conversion.to_folder(
            tmp_path / "run", read(tmp_path / "run"), str(tmp_path / "back")
        )
    assert not (tmp_path / "back").exists()


def test_an_attempt_that_fails_can_be_repeated(place, tmp_path):
    """config.json is written last: first, there is no room for the model, and then,
    a folder is in the way.
    """
    run, new = place / "run", tmp_path / "new"
    (new / "vocab.txt").mkdir(parents=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, message in (
        (100, r"model\.safetensors cannot be written: File too l"),
        (soft, r"vocab\.txt cannot be w"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OutputError, match=rf"{new}/{message}"):
                conversion.to_folder(run, read(run), str(new))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not (new / "config.json").exists()
    (new / "vocab.txt").rmdir()
    conversion.to_folder(run, read(run), str(new))
    assert (new / "config.json").exists()


def _changed(place):
    config = read(place / "run")
    config.model.norm = "pre"
    return config


@pytest.mark.parametrize(
    ("named", "expected"),
    [("</s>", ()), ("b", ("b",)), (["</s>", "b"], ("</s>", "b")), (None, ())],
)
def test_an_end_that_is_not_the_tokenizers_ends_a_text_too(named, expected, tmp_path):
    """`generate` goes by generation_config.json, e.g. that of a model for
    conversations.
    """
    tokenizer = train_tokenizer("characters", ["abc"], 9)
    save_gpt(tmp_path, LLAMA, llama_shapes())
    tokenizer_files.to_folder(tokenizer, tmp_path)
    ids = (
        [tokenizer.id_of(token) for token in named]
        if isinstance(named, list)
        else named and tokenizer.id_of(named)
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    found = conversion.config_for(str(tmp_path)).decoding.end_ids
    assert found == tuple(map(tokenizer.id_of, expected))


def test_an_id_without_a_token_ends_nothing(tmp_path):
    save_gpt(tmp_path, LLAMA | {"eos_token_id": 10**6}, llama_shapes())
    tokenizer_files.to_folder(train_tokenizer("characters", ["abc"], 9), tmp_path)
    assert conversion.config_for(str(tmp_path)).decoding.end_ids == ()
