"""The models, as Flax modules. Importing them requires only JAX and Flax."""

from transformer_jax.models.bert import (
    Bert,
    BertConfig,
    Classifier,
    Pretraining,
    TokenClassifier,
)
from transformer_jax.models.convs2s import ConvS2S
from transformer_jax.models.convs2s_config import ConvS2SConfig
from transformer_jax.models.electra import Electra
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.gpt import GPT, GPTClassifier, GPTConfig
from transformer_jax.models.recurrent import RecurrentSeq2Seq
from transformer_jax.models.recurrent_config import RecurrentConfig
from transformer_jax.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
from transformer_jax.models.transformer import Transformer, TransformerConfig

__all__ = [
    "GPT",
    "Bert",
    "BertConfig",
    "Classifier",
    "ConvS2S",
    "ConvS2SConfig",
    "Electra",
    "EncoderDecoder",
    "GPTClassifier",
    "GPTConfig",
    "Pretraining",
    "RecurrentConfig",
    "RecurrentLM",
    "RecurrentLMConfig",
    "RecurrentSeq2Seq",
    "TokenClassifier",
    "Transformer",
    "TransformerConfig",
]
