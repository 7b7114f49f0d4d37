"""One small model of each kind, with a vocabulary of 11 ids and at most 16
positions.
"""

from transformer_jax import models

WIDTHS = {
    "d_model": 8,
    "d_ff": 5,
    "num_heads": 2,
    "head_dim": 4,
    "value_dim": 4,
    "max_length": 16,
}
SINGLE = {**WIDTHS, "vocab_size": 11, "num_layers": 1}
PAIR = {"source_vocab_size": 11, "target_vocab_size": 11}
BERT = models.BertConfig(**SINGLE)
# GPTClassifier adds three special tokens to its vocabulary.
MODELS = {
    "Transformer": models.Transformer(
        models.TransformerConfig(
            **WIDTHS, **PAIR, num_encoder_layers=1, num_decoder_layers=1
        )
    ),
    "RecurrentSeq2Seq": models.RecurrentSeq2Seq(
        models.RecurrentConfig(
            **PAIR,
            embedding_dim=3,
            encoder_dim=8,
            d_model=8,
            attention_dim=5,
            attention="additive",
        )
    ),
    "ConvS2S": models.ConvS2S(
        models.ConvS2SConfig(
            **PAIR,
            embedding_dim=3,
            d_model=8,
            num_encoder_layers=1,
            num_decoder_layers=2,
            max_length=16,
        )
    ),
    "GPT": models.GPT(models.GPTConfig(**SINGLE)),
    "GPTClassifier": models.GPTClassifier(
        models.GPTConfig(**SINGLE | {"vocab_size": 8}), 3
    ),
    "RecurrentLM": models.RecurrentLM(
        models.RecurrentLMConfig(vocab_size=11, d_model=8, num_layers=1)
    ),
    "Bert": models.Bert(BERT),
    "Pretraining": models.Pretraining(BERT),
    "Classifier": models.Classifier(BERT, 3),
    "TokenClassifier": models.TokenClassifier(BERT, 3),
}
# Those that are an `EncoderDecoder`.
PAIRS = ("Transformer", "RecurrentSeq2Seq", "ConvS2S")
