"""The mathematics. Needs jax and flax only."""

from transformer_jax.models.transformer import Transformer, TransformerConfig

__all__ = ["Transformer", "TransformerConfig"]
