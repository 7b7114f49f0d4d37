"""BERT of transformers without transformers: files written by hand, by the layouts
of torch's modules.
"""

import dataclasses
import json

import numpy as np
import pytest

from helpers.bert_folders import (
    PRETRAINING,
    D,
    F,
    H,
    L,
    N,
    S,
    T,
    V,
    drawn,
    numbered,
    save,
    shapes,
)
from helpers.bert_folders import save as save_bert
from helpers.parity import flat, write_back
from transformer_jax.data import tokenizer_files
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models.bert import BertConfig


@pytest.fixture
def tensors():
    return drawn(PRETRAINING)


def test_config(tmp_path, tensors):
    found = huggingface.read(save(tmp_path, tensors))
    sizes = {
        "vocab_size": V,
        "d_model": D,
        "num_heads": N,
        "head_dim": H,
        "value_dim": H,
        "d_ff": F,
        "num_layers": L,
    }
    assert found.model == BertConfig(**sizes, max_length=T, num_segments=S)
    assert found.architecture.task == "bert_pretraining"
    assert found.outputs.settings == {"masking.next_sentence": True}


def test_each_parameter_is_where_torch_keeps_it(tmp_path, tensors):
    params = flat(huggingface.read(save(tmp_path, tensors)).params())
    layer = "bert.encoder.layer.1"
    attention = f"{layer}.attention"
    expected = {
        "bert/embedding/table": tensors["bert.embeddings.word_embeddings.weight"],
        "bert/segments": tensors["bert.embeddings.token_type_embeddings.weight"],
        "bert/positions/table": tensors["bert.embeddings.position_embeddings.weight"],
        "bert/norm/scale": tensors["bert.embeddings.LayerNorm.weight"],
        "bert/pooler/kernel": tensors["bert.pooler.dense.weight"].T,
        "masked_lm/bias": tensors["cls.predictions.bias"],
        "masked_lm/norm/bias": tensors["cls.predictions.transform.LayerNorm.bias"],
        "masked_lm/transform/kernel": (
            tensors["cls.predictions.transform.dense.weight"].T
        ),
        # their class 0 is our class 1
        "next_sentence/kernel": tensors["cls.seq_relationship.weight"][::-1].T,
        "next_sentence/bias": tensors["cls.seq_relationship.bias"][::-1],
    }
    for path, value in expected.items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)
    expected = {
        "self_attention/query/kernel": (
            np.stack(np.split(tensors[f"{attention}.self.query.weight"], N)).transpose(
                2, 0, 1
            )
        ),
        "self_attention/key/bias": tensors[f"{attention}.self.key.bias"].reshape(N, H),
        "self_attention/output/kernel": np.stack(
            np.split(tensors[f"{attention}.output.dense.weight"].T, N)
        ),
        "self_attention_residual/layer_norm/scale": tensors[
            f"{attention}.output.LayerNorm.weight"
        ],
        "feed_forward/inner/kernel": tensors[f"{layer}.intermediate.dense.weight"].T,
        "feed_forward/outer/bias": tensors[f"{layer}.output.dense.bias"],
        "feed_forward_residual/layer_norm/bias": tensors[
            f"{layer}.output.LayerNorm.bias"
        ],
    }
    for path, value in expected.items():
        np.testing.assert_array_equal(
            params[f"bert/encoder/layers/{path}"][1], value, err_msg=path
        )


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM", "BertModel"])
def test_there_and_back_without_a_change(tmp_path, tensors, name):
    found = huggingface.read(save(tmp_path / "theirs", tensors, architectures=[name]))
    params = found.params()
    write_back(found, params, tmp_path / "ours")
    again = huggingface.read(tmp_path / "ours")
    assert again.model == found.model
    assert again.architecture.name == name
    new, old = flat(again.params()), flat(params)
    assert new.keys() == old.keys()
    for path, value in new.items():
        lacking = any(
            path.startswith(f"{module}/") for module in found.architecture.lacks
        )
        np.testing.assert_array_equal(
            value, np.zeros_like(value) if lacking else old[path], err_msg=path
        )


def test_a_file_without_the_prefix_and_one_with_old_names(tmp_path, tensors):
    """`BertModel` saves names without "bert."; files of 2018 call gains gamma and
    biases of norms beta.
    """
    expected = flat(huggingface.read(save(tmp_path / "new", tensors)).params())
    bare = {
        name.removeprefix("bert."): x
        for name, x in tensors.items()
        if name.startswith("bert.")
    }
    params = flat(
        huggingface.read(
            save(tmp_path / "bare", bare, architectures=["BertModel"])
        ).params()
    )
    params = {path: value for path, value in params.items() if path.startswith("bert/")}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): x
        for name, x in tensors.items()
    }
    named = flat(huggingface.read(save(tmp_path / "old", old)).params())
    assert named.keys() == expected.keys()
    for found in (params, named):
        for path, value in found.items():
            np.testing.assert_array_equal(value, expected[path], err_msg=path)


def test_padding_rows_are_zeros_here_and_absent_there(tmp_path, tensors):
    found = huggingface.read(
        save(tmp_path / "theirs", tensors), BertConfig(vocab_multiple=8)
    )
    params = flat(found.params())
    assert params["bert/embedding/table"].shape == (64, D)
    assert params["masked_lm/bias"].shape == (64,)
    assert not params["bert/embedding/table"][V:].any()
    np.testing.assert_array_equal(
        params["bert/embedding/table"][:V],
        tensors["bert.embeddings.word_embeddings.weight"],
    )
    write_back(found, found.params(), tmp_path / "ours")
    ours = huggingface.read(tmp_path / "ours")
    np.testing.assert_array_equal(
        flat(ours.params())["masked_lm/bias"], tensors["cls.predictions.bias"]
    )


@pytest.mark.parametrize(
    "name",
    [
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "bert.embeddings.position_ids",
    ],
)
def test_tied_decoders_and_buffers_need_no_place(tmp_path, tensors, name):
    found = huggingface.read(
        save(tmp_path / "more", tensors | {name: np.zeros(5, np.float32)})
    )
    assert (
        found.parameters.keys()
        == huggingface.read(save(tmp_path / "plain", tensors)).parameters.keys()
    )


TAGGED = shapes(("classifier", (5, D)))

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.mark.parametrize(
    ("theirs", "types", "order"),
    [
        (LABELS, ("PER", "LOC"), [0, 1, 2, 3, 4]),
        (["B-LOC", "B-PER", "I-LOC", "I-PER", "O"], ("LOC", "PER"), [4, 0, 2, 1, 3]),
    ],
)
def test_the_order_of_tags_is_ours(tmp_path, theirs, types, order):
    tensors = drawn(TAGGED)
    folder = save(
        tmp_path / "theirs",
        tensors,
        architectures=["BertForTokenClassification"],
        **numbered(theirs),
    )
    found = huggingface.read(folder)
    assert found.outputs.settings == {"data.types": types, "data.scheme": "iob2"}
    params = flat(found.params())
    np.testing.assert_array_equal(
        params["head/kernel"], tensors["classifier.weight"][order].T
    )
    np.testing.assert_array_equal(
        params["head/bias"], tensors["classifier.bias"][order]
    )
    write_back(found, found.params(), tmp_path / "ours")
    again = huggingface.read(tmp_path / "ours")
    assert again.outputs.settings == found.outputs.settings
    np.testing.assert_array_equal(
        flat(again.params())["head/kernel"], params["head/kernel"]
    )


@pytest.mark.parametrize(
    ("name", "labels", "task", "settings"),
    [
        (
            "BertForSequenceClassification",
            ["no", "yes"],
            "classification",
            {"data.labels": ("no", "yes")},
        ),
        ("BertForSequenceClassification", ["score"], "regression", {}),
        ("BertForMultipleChoice", ["a", "b"], "multiple_choice", {}),
        ("BertForQuestionAnswering", ["a", "b"], "question_answering", {}),
    ],
)
def test_tasks_and_their_settings(tmp_path, name, labels, task, settings):
    number = 1 if task == "multiple_choice" else len(labels)
    head = "qa_outputs" if task == "question_answering" else "classifier"
    folder = save(
        tmp_path / "theirs",
        drawn(shapes((head, (number, D)))),
        architectures=[name],
        **numbered(labels),
    )
    found = huggingface.read(folder)
    assert (found.architecture.task, found.outputs.settings) == (task, settings)
    write_back(found, found.params(), tmp_path / "ours")
    again = huggingface.read(tmp_path / "ours")
    assert (again.architecture, again.outputs, again.model) == (
        found.architecture,
        found.outputs,
        found.model,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_act": "mish"},
            (
                "config.json: hidden_act = 'mish' is not supported: "
                "choose from gelu, gelu_new"
            ),
        ),
        (
            {"is_decoder": True},
            "config.json: is_decoder = True is not supported, only False",
        ),
        (
            {"hidden_act": ["gelu"]},
            r"config.json: hidden_act = \['gelu'\] is not supported: choose from gelu",
        ),
        (
            {"hidden_size": "21"},
            "config.json: hidden_size = '21' must be of type int: copy the file again",
        ),
        ({"hidden_size": None}, "config.json: hidden_size = None must be of type int"),
        (
            {"layer_norm_eps": "small"},
            "config.json: layer_norm_eps = 'small' must be of type float",
        ),
        (
            {"hidden_size": 22},
            (
                r"config.json: hidden_size = 22 \(here, config.model.d_model\): must be"
                r" a multiple of the number of he"
            ),
        ),
        (
            {"num_attention_heads": 0},
            (
                r"num_attention_heads = 0 \(here, config.model.num_heads\): must be at"
                r" least 1"
            ),
        ),
        (
            {"num_hidden_layers": 0},
            (
                r"num_hidden_layers = 0 \(here, config.model.num_layers\): must be at"
                r" least 1"
            ),
        ),
        (
            {"hidden_dropout_prob": 1.5},
            (
                r"hidden_dropout_prob = 1.5 \(here, config.model.dropout_rate\): must"
                r" be in"
            ),
        ),
        (
            {"layer_norm_eps": -1},
            (
                r"layer_norm_eps = -1.0 \(here, config.model.norm_epsilon\): must be"
                r" positive"
            ),
        ),
        (
            {"type_vocab_size": 1},
            (
                r"type_vocab_size = 1 \(here, config.model.num_segments\): must be at"
                r" least 2, "
            ),
        ),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type = 'relative_key' is not supported, only",
        ),
        (
            {"architectures": ["T5Model"]},
            (
                r"architectures = \['T5Model'\] is not supported: the first must be"
                r" .*BertModel"
            ),
        ),
        (
            {"architectures": []},
            r"architectures = \[\] is not supported: the first must be one of BertFor",
        ),
        ({"architectures": {"a": 1}}, r"architectures = \{'a': 1\} is not supported"),
        (
            {"vocab_size": 67},
            r"config.json is of another model; copy all files of one. These tensors"
            r" have other shapes:\n"
            r"  bert.embeddings.word_embeddings.weight: \(61, 21\) in the file, \(67,"
            r" 21\) by config.json\n"
            r"  cls.predictions.bias: \(61,\) in the file, \(67,\) by config.json$",
        ),
        (
            {"num_hidden_layers": 3},
            (
                r"These tensors are missing:\n "
                r" bert.encoder.layer.2.attention.output.LayerNorm.bias\n(.*\n)+  and 6"
                r" more$"
            ),
        ),
        (
            {"num_hidden_layers": 1},
            (
                r"These tensors have no place in config.json:\n "
                r" bert.encoder.layer.1.attention.output.LayerNorm.bias\n"
            ),
        ),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "problem_type": "multi_label_classification",
            },
            (
                "BertForSequenceClassification with "
                "problem_type = 'multi_label_classification' and 0 labels is not suppor"
            ),
        ),
        (
            {
                "architectures": ["BertForTokenClassification"],
                "id2label": {"0": "O", "1": "L-PER"},
            },
            (
                "id2label has O, L-PER: supported are different tags among O and, "
                "for each type of entity, B and I, or B, "
            ),
        ),
        (
            {
                "architectures": ["BertForTokenClassification"],
                "id2label": {"0": "O", "2": "I-PER"},
            },
            "id2label has the numbers 0, 2: they must be 0, 1, 2, …",
        ),
        (
            {"architectures": ["BertForTokenClassification"], "id2label": ["O"]},
            r"id2label = \['O'\] must be an object of numbers and labels",
        ),
        (
            {"architectures": ["BertForTokenClassification"], "num_labels": "two"},
            "num_labels = 'two' must be of type int",
        ),
    ],
)
def test_other_configs_are_refused(tmp_path, tensors, changes, message):
    with pytest.raises(InteropError, match=message) as error:
        huggingface.read(save(tmp_path, tensors, **changes))
    assert str(error.value).startswith(str(tmp_path))


def test_a_missing_head_is_named(tmp_path, tensors):
    with pytest.raises(
        InteropError,
        match=r"These tensors are missing:\n  classifier.bias\n  classifier.weight$",
    ):
        huggingface.read(
            save(tmp_path, drawn(shapes()), architectures=["BertForMultipleChoice"])
        )
    del tensors["cls.predictions.bias"]  # a head that is there in part only
    with pytest.raises(
        InteropError, match=r"These tensors are missing:\n  cls.predictions.bias$"
    ):
        huggingface.read(save(tmp_path, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"norm": "pre"},
            "config.model.norm = 'pre': transformers' model has only 'post'",
        ),
        ({"head_dim": 5}, "config.model.head_dim = 5: transformers' model has only 7"),
        (
            {"causal": True},
            "config.model.causal = True: transformers' model has only False",
        ),
    ],
)
def test_models_that_transformers_does_not_have(tmp_path, tensors, change, message):
    found = huggingface.read(save(tmp_path / "theirs", tensors))
    model = dataclasses.replace(found.model, **change)
    with pytest.raises(InteropError, match=message):
        huggingface.write(
            tmp_path / "ours", "bert_pretraining", model, found.params(), {}
        )
    assert not (tmp_path / "ours").exists()


def test_what_cannot_be_written(tmp_path, tensors):
    found = huggingface.read(save(tmp_path / "theirs", tensors))
    with pytest.raises(
        InteropError, match=r"theirs already has a config.json: name another folder"
    ):
        write_back(found, found.params(), tmp_path / "theirs")
    with pytest.raises(
        InteropError,
        match=(
            "sequence_to_sequence with a BertConfig "
            "has no counterpart in transformers: "
        ),
    ):
        huggingface.write(
            tmp_path / "ours", "sequence_to_sequence", found.model, found.params(), {}
        )


def test_parameters_that_do_not_fit(tmp_path, tensors):
    found = huggingface.read(save(tmp_path / "theirs", tensors))
    params = found.params()
    params["bert"]["pooler"] = {
        "kernel": params["bert"]["pooler"]["kernel"][:7],
        "gain": np.ones(D),
    }
    with pytest.raises(
        InteropError,
        match=(
            r"or another shape there:\n  bert/pooler/gain: \(21,\)\n "
            r" bert/pooler/kernel: \(7,"
        ),
    ):
        write_back(found, params, tmp_path / "ours")


def test_folders(tmp_path, tensors):
    assert tokenizer_files.is_folder(save(tmp_path, tensors))
    assert not tokenizer_files.is_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"task": "tagging"}))
    assert not tokenizer_files.is_folder(tmp_path)
    (tmp_path / "config.json").write_text("[")
    assert not tokenizer_files.is_folder(tmp_path)
    with pytest.raises(
        InteropError,
        match=r"config.json is not a JSON object \(Expecting .*\): copy it again",
    ):
        huggingface.read(tmp_path)
    with pytest.raises(
        InteropError,
        match="tensors are mapped from local files; copy the folder to this machine",
    ):
        huggingface.read("gs://bucket/folder")


IOB1 = ["B-LOC", "I-LOC", "I-PER", "O"]


def test_tags_that_iob1_lacks_are_never_predicted(tmp_path):
    tensors = drawn(shapes(("classifier", (4, D))))
    save_bert(
        tmp_path / "theirs",
        tensors,
        architectures=["BertForTokenClassification"],
        **numbered(IOB1),
    )
    found = huggingface.read(tmp_path / "theirs")
    assert found.outputs.settings == {
        "data.types": ("LOC", "PER"),
        "data.scheme": "iob2",
    }
    assert found.outputs.names == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert found.outputs.present == ("O", "B-LOC", "I-LOC", "I-PER")
    params = flat(found.params())
    kernel, bias = tensors["classifier.weight"].T, tensors["classifier.bias"]
    np.testing.assert_array_equal(params["head/kernel"][:, [1, 2, 4, 0]], kernel)
    np.testing.assert_array_equal(params["head/bias"][[1, 2, 4, 0]], bias)
    assert not params["head/kernel"][:, 3].any()
    assert params["head/bias"][3] == -1e4
    write_back(found, found.params(), tmp_path / "again")
    again = flat(huggingface.read(tmp_path / "again").params())
    for path in ("head/kernel", "head/bias"):
        np.testing.assert_array_equal(again[path], params[path])
