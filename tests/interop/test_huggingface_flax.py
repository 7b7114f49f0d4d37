"""Files of Flax models: `tests/golden/flax_…` were written by transformers 4.57.6, with
random weights, beside the logits that its Flax models computed.
"""

import json
import shutil

import flax.serialization
import jax
import numpy as np
import pytest

from helpers import ROOT
from helpers.oracle import relative
from transformer_jax.interop import huggingface, tensors
from transformer_jax.interop.tensors import InteropError, Tensors

GOLDEN = ROOT / "tests" / "golden"


@pytest.mark.parametrize("name", ["flax_bert", "flax_gpt2"])
def test_logits_are_those_of_the_flax_model(name):
    found = huggingface.read(GOLDEN / name)
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    tokens = np.array(expected["tokens"])
    valid = np.array(expected["valid"]) == 1
    logits = jax.jit(found.module.apply)({"params": found.params()}, tokens, valid)
    rows = valid if logits.ndim == 3 else slice(None)
    assert relative(logits[rows], np.array(expected["logits"])[rows]) < 1e-5


def test_what_is_written_is_a_file_of_safetensors(tmp_path):
    shutil.copytree(GOLDEN / "flax_bert", tmp_path / "theirs")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abc"]
    (tmp_path / "theirs" / "vocab.txt").write_text("\n".join(words) + "\n")
    found = huggingface.read(tmp_path / "theirs")
    found.write(tmp_path / "ours", found.params())
    written = Tensors(tmp_path / "ours")
    assert isinstance(written["classifier.weight"], np.memmap)
    theirs = Tensors(tmp_path / "theirs")
    assert set(written) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)


def test_the_file_of_pytorch_comes_first(tmp_path):
    shutil.copytree(GOLDEN / "flax_gpt2", tmp_path, dirs_exist_ok=True)
    tensors.write(
        tmp_path / tensors.FILE, [("a", (3,), lambda: np.zeros(3, np.float32))]
    )
    assert list(Tensors(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        (GOLDEN / "flax_gpt2" / tensors.FLAX).read_bytes()[:-7],
        flax.serialization.msgpack_serialize([1, 2]),
    ],
)
def test_a_damaged_file(tmp_path, content):
    (tmp_path / tensors.FLAX).write_bytes(content)
    with pytest.raises(InteropError, match=r"flax_model\.msgpack is damaged"):
        Tensors(tmp_path)
