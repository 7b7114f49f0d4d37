"""Hugging Face folders of GPT-2 and Llama, written without transformers."""

import json
import string

import numpy as np

from helpers.parity import write_file

V, D, N, F, L, T = 31, 30, 5, 23, 2, 11
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": V,
    "n_positions": T,
    "n_embd": D,
    "n_head": N,
    "n_layer": L,
    "n_inner": F,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": T,
}


def gpt2_shapes(v=V, t=T, f=F):
    shapes = {
        "wte.weight": (v, D),
        "wpe.weight": (t, D),
        "ln_f.weight": (D,),
        "ln_f.bias": (D,),
    }
    linears = {
        "attn.c_attn": (D, 3 * D),
        "attn.c_proj": (D, D),
        "mlp.c_fc": (D, f),
        "mlp.c_proj": (f, D),
    }
    for layer in range(L):
        for name, shape in linears.items():
            shapes |= {
                f"h.{layer}.{name}.weight": shape,
                f"h.{layer}.{name}.bias": shape[1:],
            }
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.weight": (D,), f"h.{layer}.{name}.bias": (D,)}
    return shapes


def llama_shapes():
    shapes = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for layer in range(L):
        for name, shape in {
            "self_attn.q_proj": (24, D),
            "self_attn.k_proj": (8, D),
            "self_attn.v_proj": (8, D),
            "self_attn.o_proj": (D, 24),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


def save(folder, config, shapes):
    """Write random tensors, and return them."""
    draw = np.random.default_rng(0)
    tensors = {
        name: draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return tensors


def save_gpt2(folder):
    """Write a folder of GPT-2 with a tokenizer of letters."""
    tokens = ["!", "Ġ", *string.ascii_lowercase, "<|endoftext|>"]
    size = len(tokens)
    save(folder, GPT2 | {"vocab_size": size, "n_positions": 37}, gpt2_shapes(size, 37))
    ids = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("#version: 0.2\n")
