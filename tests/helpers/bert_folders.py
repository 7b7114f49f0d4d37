"""Hugging Face folders of small BERTs, written without transformers."""

import json
import string

import numpy as np

from helpers.parity import write_file

V, D, N, H, F, L, T, S = 61, 21, 3, 7, 23, 2, 37, 3
CONFIG = {
    "architectures": ["BertForPreTraining"],
    "model_type": "bert",
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": N,
    "intermediate_size": F,
    "max_position_embeddings": T,
    "type_vocab_size": S,
    "hidden_act": "gelu",
}
LINEARS = {
    "attention.self.query": (D, D),
    "attention.self.key": (D, D),
    "attention.self.value": (D, D),
    "attention.output.dense": (D, D),
    "intermediate.dense": (F, D),
    "output.dense": (D, F),
}


def shapes(*heads):
    """Return the shapes of the tensors of an encoder with the prefix "bert.", its
    pooler and `heads`.
    """
    found = {
        f"bert.embeddings.{name}_embeddings.weight": (rows, D)
        for name, rows in NAMES.items()
    }
    norms = ["bert.embeddings.LayerNorm"]
    linears = {"bert.pooler.dense": (D, D)} | dict(heads)
    for layer in range(L):
        start = f"bert.encoder.layer.{layer}"
        norms += [f"{start}.attention.output.LayerNorm", f"{start}.output.LayerNorm"]
        linears |= {f"{start}.{name}": shape for name, shape in LINEARS.items()}
    for name in norms:
        found |= {f"{name}.weight": (D,), f"{name}.bias": (D,)}
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


NAMES = {"word": V, "token_type": S, "position": T}
MASKED_LM = {
    "cls.predictions.bias": (V,),
    "cls.predictions.transform.LayerNorm.weight": (D,),
    "cls.predictions.transform.LayerNorm.bias": (D,),
    "cls.predictions.transform.dense.weight": (D, D),
    "cls.predictions.transform.dense.bias": (D,),
}
PRETRAINING = shapes(("cls.seq_relationship", (2, D))) | MASKED_LM


def drawn(shapes, seed=0):
    draw = np.random.default_rng(seed)
    return {
        name: draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def save(folder, tensors, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    write_file(folder / "model.safetensors", tensors)
    letters = [
        *string.ascii_lowercase,
        *(f"##{letter}" for letter in string.ascii_lowercase),
    ]
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]) + "\n"
    )
    return folder


def save_classifier(folder, labels=("bad", "good")):
    """Write a folder with the class BertForSequenceClassification."""
    tensors = drawn(shapes(("classifier", (len(labels), D))))
    classes = {"architectures": ["BertForSequenceClassification"]}
    return save(folder, tensors, **classes, **numbered(labels))


def numbered(labels):
    return {"id2label": {str(i): label for i, label in enumerate(labels)}}
