"""Hugging Face folders of T5, written without transformers."""

import json

import numpy as np

from helpers.parity import write_file

V, D, N, H, F, R = 31, 21, 3, 5, 23, 6
CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": V,
    "d_model": D,
    "d_kv": H,
    "d_ff": F,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": N,
    "relative_attention_num_buckets": R,
    "relative_attention_max_distance": 7,
    "dropout_rate": 0.2,
    "feed_forward_proj": "relu",
}
# the changes of version 1.1
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
IDS = {"pad_id": 0, "bos_id": 0, "eos_id": 1}


def shapes(gated=False):
    """Return the shapes of the tensors of version 1.0, or of 1.1 if `gated`."""
    found = {"shared.weight": (V, D)}
    if gated:
        found["lm_head.weight"] = (V, D)
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        found[f"{first}.relative_attention_bias.weight"] = (R, N)
        found[f"{stack}.final_layer_norm.weight"] = (D,)
        names = ["SelfAttention", "EncDecAttention"][: 1 + (stack == "decoder")]
        for layer in range(layers):
            start = f"{stack}.block.{layer}.layer"
            for i, name in enumerate(names):
                for part in "qkv":
                    found[f"{start}.{i}.{name}.{part}.weight"] = (N * H, D)
                found[f"{start}.{i}.{name}.o.weight"] = (D, N * H)
            last = f"{start}.{len(names)}.DenseReluDense"
            for part in ("wi_0", "wi_1") if gated else ("wi",):
                found[f"{last}.{part}.weight"] = (F, D)
            found[f"{last}.wo.weight"] = (D, F)
            for i in range(len(names) + 1):
                found[f"{start}.{i}.layer_norm.weight"] = (D,)
    return found


KINDS = {"v1_0": (shapes(), {}), "v1_1": (shapes(gated=True), V1_1)}


def save(folder, shapes, **changes):
    draw = np.random.default_rng(0)
    tensors = {
        name: draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    write_file(folder / "model.safetensors", tensors)
    return tensors
