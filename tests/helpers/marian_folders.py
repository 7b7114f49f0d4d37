"""Hugging Face folders of Marian, written without transformers."""

import json

import numpy as np

from helpers.parity import write_file

V, D, N, H, F, T = 31, 21, 3, 7, 23, 37
CONFIG = {
    "architectures": ["MarianMTModel"],
    "model_type": "marian",
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": N,
    "decoder_attention_heads": N,
    "encoder_ffn_dim": F,
    "decoder_ffn_dim": F,
    "max_position_embeddings": T,
    "activation_function": "swish",
    "scale_embedding": True,
}
IDS = {"pad_id": 30, "bos_id": 30, "eos_id": 0}


def linear(name, inputs, outputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name):
    return {f"{name}.weight": (D,), f"{name}.bias": (D,)}


def shapes(target=V):
    """Return the shapes of the tensors, without those of the embeddings."""
    found = {"final_logits_bias": (1, target)}
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        for layer in range(layers):
            start = f"model.{stack}.layers.{layer}"
            for attention in ("self_attn", "encoder_attn")[: 1 + (stack == "decoder")]:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    found |= linear(f"{start}.{attention}.{part}", D, D)
                found |= norm(f"{start}.{attention}_layer_norm")
            found |= linear(f"{start}.fc1", D, F) | linear(f"{start}.fc2", F, D)
            found |= norm(f"{start}.final_layer_norm")
    return found


SHARED = shapes() | {"model.shared.weight": (V, D)}
SEPARATE = shapes(29) | {
    "model.encoder.embed_tokens.weight": (V, D),
    "model.decoder.embed_tokens.weight": (29, D),
}
UNTIED = SEPARATE | {"lm_head.weight": (29, D)}
SEPARATELY = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 29}
KINDS = {
    "all": (SHARED, {}),
    "decoder": (SEPARATE, SEPARATELY),
    "none": (UNTIED, {**SEPARATELY, "tie_word_embeddings": False}),
}


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
