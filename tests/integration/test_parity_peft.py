"""Adapters against peft: theirs here, and ours there."""

import numpy as np
import pytest

import transformer_jax
from helpers.bert_folders import D, drawn, numbered, save, shapes
from helpers.parity import need_transformers
from transformer_jax import conversion
from transformer_jax.workdir import read

transformers, torch = need_transformers()
peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

TEXTS = ["ab cd", "q r s t", "zzz"]


def probabilities(model, tokenizer):
    with torch.no_grad():
        return [
            model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0].numpy()
            for text in TEXTS
        ]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_compute_the_same_in_both(tmp_path):
    tensors = drawn(shapes(("classifier", (3, D))))
    base = save(
        tmp_path / "base",
        {name: 0.3 * x for name, x in tensors.items()},
        architectures=["BertForSequenceClassification"],
        **numbered(["bad", "fair", "good"]),
    )

    def model():
        return transformers.AutoModelForSequenceClassification.from_pretrained(base)

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["query", "output.dense"],
        modules_to_save=["classifier"],
        init_lora_weights=False,
        use_rslora=True,
    )
    theirs = peft.get_peft_model(model(), config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(1.0)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = probabilities(theirs, tokenizer)
    assert (
        np.abs(np.subtract(probabilities(model().eval(), tokenizer), expected)).max()
        > 0.05
    )

    run = tmp_path / "run"
    adapter = str(tmp_path / "adapter")
    conversion.to_workdir(conversion.config_for(str(base), adapter), run, adapter)
    ours = [
        [*prediction["probabilities"].values()]
        for prediction in transformer_jax.load(run).predict(TEXTS)
    ]
    np.testing.assert_allclose(ours, expected, atol=1e-6)

    conversion.to_adapter(run, read(run), str(tmp_path / "again"))
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "again").eval()
    np.testing.assert_array_equal(probabilities(again, tokenizer), expected)
