"""T5 (Raffel et al. 2020): `Transformer` with other settings.

Section 2.1 says what differs from Vaswani et al. 2017: norms precede the sub-layers and
only rescale (`RMSNorm`), positions are scalars that are added to scores, and dropout
acts inside of feed-forward networks, on residual connections, on attention weights, and
on inputs and outputs of the stacks. The rest is in the authors' code: linear maps have
no biases, and scores are not divided by √d_k, which is part of the initial weights
instead. Version 1.1 has gated GELU (Shazeer 2020) and an output layer with its own
table.

Differs: In the authors' code, all positions of a sequence drop the same units. Here,
each position draws its own.
"""

from typing import Any

from transformer_jax.models.transformer import TransformerConfig

# in both versions
COMMON: dict[str, Any] = {
    "norm": "pre",
    "norm_type": "rms_norm",
    "norm_epsilon": 1e-6,
    "positions": "relative_bias",
    "relative_buckets": 32,
    "max_bucket_distance": 128,
    "attention_bias": False,
    "feed_forward_bias": False,
    "scale_scores": False,
    "embedding_scale": False,
    "init": "fan_in",
    "embedding_init": "standard_normal",
    # 32,000 word pieces and 100 sentinels, rounded up to a multiple of 128
    "source_vocab_size": 32128,
    "target_vocab_size": 32128,
}
VERSIONS: dict[str, dict[str, Any]] = {
    # As one table is embedding and output layer, the vectors that the latter reads are
    # divided by √d_model.
    "v1_0": {
        "feed_forward": "plain",
        "activation": "relu",
        "tie_embeddings": "all",
        "output_scale": True,
    },
    "v1_1": {
        "feed_forward": "gated",
        "activation": "gelu_tanh",
        "tie_embeddings": "embeddings",
        "output_scale": False,
    },
}


def dropout(rate: float) -> dict[str, float]:
    """Return fields of `TransformerConfig` for T5's one rate of dropout."""
    return {
        "dropout_rate": rate,
        "attention_dropout_rate": rate,
        "feed_forward_dropout_rate": rate,
        "final_dropout_rate": rate,
    }


def _fields(
    version: str,
    num_layers: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    head_dim: int = 64,
) -> dict[str, Any]:
    """Return fields of `TransformerConfig` for a size of T5.

    `num_layers` is the number of layers of the encoder, and of the decoder. The heads
    together need not be as wide as the model.
    """
    size = {
        "num_encoder_layers": num_layers,
        "num_decoder_layers": num_layers,
        "d_model": d_model,
        "d_ff": d_ff,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
    }
    # version 1.1 is pre-trained without dropout
    rate = 0.1 if version == "v1_0" else 0.0
    return {**COMMON, **VERSIONS[version], **dropout(rate), **size}


# The sizes of Raffel et al. 2020, Section 3.7, those of version 1.1 as released, and
# one for a CPU.
SIZES: dict[str, dict[str, Any]] = {
    "small": _fields("v1_0", 6, 512, 2048, 8),
    "base": _fields("v1_0", 12, 768, 3072, 12),
    "large": _fields("v1_0", 24, 1024, 4096, 16),
    "3b": _fields("v1_0", 24, 1024, 16384, 32, 128),
    "11b": _fields("v1_0", 24, 1024, 65536, 128, 128),
    "v1_1-small": _fields("v1_1", 8, 512, 1024, 6),
    "v1_1-base": _fields("v1_1", 12, 768, 2048, 12),
    "v1_1-large": _fields("v1_1", 24, 1024, 2816, 16),
    "v1_1-xl": _fields("v1_1", 24, 2048, 5120, 32),
    "v1_1-xxl": _fields("v1_1", 24, 4096, 10240, 64),
    "mini": {
        **_fields("v1_1", 4, 256, 512, 4),
        "source_vocab_size": 8000,
        "target_vocab_size": 8000,
    },
}


def t5(size: str = "small") -> TransformerConfig:
    """Return the config of T5 in one of `SIZES`."""
    return TransformerConfig(**SIZES[size])
