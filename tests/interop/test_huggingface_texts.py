"""Texts for a model that was read from a folder, and folders with other parameters."""

import json
import re

import jax
import numpy as np
import pytest

from helpers import bart_folders, t5_folders
from helpers.bert_folders import D, drawn, numbered, shapes
from helpers.bert_folders import save as save_bert
from helpers.encoder_folders import save as save_encoder
from helpers.encoder_folders import tensors
from helpers.gpt_folders import LLAMA, llama_shapes
from helpers.gpt_folders import save as save_gpt
from transformer_jax.data import tokenizer_files
from transformer_jax.data.tokenizer_training import train_tokenizer
from transformer_jax.files import write_all
from transformer_jax.interop import huggingface
from transformer_jax.interop.tensors import Tensors

TEXTS = ["ab", "a b a"]
CLASSES = {"architectures": ["BertForSequenceClassification"]}
CLASSES |= numbered(["bad", "fair", "good"])


def bert(folder):
    save_bert(folder, drawn(shapes(("classifier", (3, D)))), **CLASSES)


def xlm_r(folder):
    arrays = tensors("XLMRoberta", masked_lm=True, pooler=False)
    save_encoder(folder, "XLMRoberta", "ForMaskedLM", arrays)


def llama(folder):
    save_gpt(folder, LLAMA, llama_shapes())
    write_all(folder, tokenizer_files.contents(of_letters(), begin=True))


def t5(folder):
    t5_folders.save(folder, t5_folders.shapes(), decoder_start_token_id=0)
    write_all(folder, tokenizer_files.contents(of_letters(), end=True))


def mbart(folder):
    bart_folders.save("MBart", folder)
    bart_folders.save_tokenizer("MBart", folder)


def of_letters():
    return train_tokenizer("bpe_metaspace", ["a b c d e f g"], 20)


FOLDERS = {
    "bert": (bert, ["[CLS]"], ["[SEP]"]),
    "xlm_r": (xlm_r, ["<s>"], ["</s>"]),
    "llama": (llama, ["<s>"], []),
    "t5": (t5, [], ["</s>"]),
    "mbart": (mbart, [], ["</s>", "en_XX"]),
}


@pytest.fixture(params=FOLDERS, scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def found(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind) / "theirs"
    FOLDERS[kind][0](folder)
    return huggingface.read(folder)


def test_ids_of_texts_and_what_is_around_them(kind, found):
    _, before, after = FOLDERS[kind]
    tokens, valid = found.tokenize(TEXTS)
    tokenizer = tokenizer_files.from_folder(found.folder)
    assert tokens.shape == valid.shape == (2, valid[1].sum())
    assert (tokens[~valid] == (tokenizer.pad_id or 0)).all()
    for row, ids in enumerate(tokenizer.encode_batch(TEXTS)):
        expected = [*map(tokenizer.id_of, before), *ids, *map(tokenizer.id_of, after)]
        assert tokens[row, valid[row]].tolist() == expected
    nothing, _ = found.tokenize([])
    assert nothing.shape == (0, 0)


@pytest.mark.parametrize("kind", ["bert", "xlm_r", "mbart"], indirect=True)
def test_other_parameters_are_written_with_the_same_tokenizer(kind, found, tmp_path):
    doubled = jax.tree.map(lambda x: 2 * np.asarray(x), found.params())
    found.write(tmp_path / "ours", doubled)
    again = huggingface.read(tmp_path / "ours")
    assert (again.model, again.outputs) == (found.model, found.outputs)
    theirs, ours = Tensors(found.folder), Tensors(tmp_path / "ours")
    assert set(theirs) == set(ours)
    for name, tensor in ours.items():
        # no position reads the first two rows
        skips = kind != "bert" and re.search("position_embeddings|embed_pos", name)
        rows = slice(2 if skips else 0, None)
        np.testing.assert_array_equal(tensor[rows], 2 * theirs[name][rows], name)
    for row, expected in zip(again.tokenize(TEXTS), found.tokenize(TEXTS), strict=True):
        np.testing.assert_array_equal(row, expected)
    if kind == "mbart":
        content = (tmp_path / "ours" / "generation_config.json").read_text()
        begin = json.loads(content)["decoder_start_token_id"]
        assert begin == bart_folders.GERMAN
