"""The comparison with CTranslate2: both sides have the same model and write as many
tokens; what cannot be compared is refused.
"""

import importlib.util
import json

import pytest

from helpers import ROOT
from helpers.forked import begun

COMMAND = (
    ROOT / "scripts" / "pytorch" / "translation.py",
    "--config=configs/wmt14.py:base",
    "--config.model.dtype=float32",
    "--config.model.unroll=1",
    "--small",
    "--sentences=3",
    "--length=6",
    "--tokens=5",
    "--rounds=2",
)
PACKAGES = ("ctranslate2", "transformers", "torch", "sentencepiece")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def run(*arguments):
    with begun(*COMMAND, *arguments) as running:
        return running.end()


@pytest.mark.skipif(
    bool(MISSING), reason="pip install ctranslate2 'transformer_jax[huggingface]'"
)
@pytest.mark.parametrize("beam", [1, 4])
def test_both_sides_translate_in_the_same_way(beam):
    result = run(f"--beam={beam}")
    assert result.returncode == 0, result.stderr.decode()
    (line,) = result.stdout.decode().splitlines()
    values = json.loads(line)
    assert values["same"] == values["sentences"] == 3
    assert values["beam"] == beam
    low, high = values["ratio_range"]
    assert 0 < low <= values["ratio"] <= high
    assert values["here_tokens_per_s"] > 0
    assert values["ctranslate2_tokens_per_s"] > 0
    assert values["dtype"] == values["ctranslate2_dtype"] == "float32"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "--config=configs/bert.py:mini",
            "model.architecture = 'bert': must be 'transformer'",
        ),
        ("--tokens=33", "--tokens=33: must be at most model.max_length = 32"),
        (
            "--config.model.target_vocab_size=300",
            "must be equal; add --config.model.target_vocab_size=37000",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(argument, words):
    result = run(argument)
    assert result.returncode == 2
    assert result.stdout == b""
    assert words in result.stderr.decode()


@pytest.mark.skipif(not MISSING, reason="all packages of the comparison are installed")
def test_a_missing_package_is_named_with_the_remedy():
    result = run()
    assert result.returncode == 2
    message = result.stderr.decode()
    assert f"No module named '{MISSING[0]}'" in message
    assert "pip install ctranslate2" in message
