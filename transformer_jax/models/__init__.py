"""The mathematics. Needs jax and flax only."""

from transformer_jax.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
from transformer_jax.models.transformer import Transformer, TransformerConfig

__all__ = ["RecurrentConfig", "RecurrentSeq2Seq", "Transformer", "TransformerConfig"]
