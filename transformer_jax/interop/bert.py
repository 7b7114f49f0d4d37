"""BERT of transformers (`BertModel` and its heads), as `models.bert`."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn

from transformer_jax.interop.architecture import (
    Architecture,
    Classes,
    ConfigMap,
    Fixed,
    Outputs,
    Tags,
    Value,
)
from transformer_jax.interop.layouts import JOINING, LINEAR, Entry, Layout, linear, norm
from transformer_jax.models import bert

NEVER = -1e4  # the bias of outputs that a folder lacks, so that they are not predicted
CONFIG = ConfigMap(
    bert.BertConfig,
    names={
        "vocab_size": ("vocab_size", 30522),
        "hidden_size": ("d_model", 768),
        "num_hidden_layers": ("num_layers", 12),
        "num_attention_heads": ("num_heads", 12),
        "intermediate_size": ("d_ff", 3072),
        "max_position_embeddings": ("max_length", 512),
        "type_vocab_size": ("num_segments", 2),
        "layer_norm_eps": ("norm_epsilon", 1e-12),
        "hidden_dropout_prob": ("dropout_rate", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout_rate", 0.1),
    },
    choices={
        "hidden_act": (
            "activation",
            "gelu",
            {
                "gelu": "gelu",
                "gelu_new": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh",
                "relu": "relu",
                "silu": "silu",
            },
        )
    },
    theirs={
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    ours={
        "architecture": "bert",
        "causal": False,
        "num_kv_heads": 0,
        "feed_forward": "plain",
        "norm": "post",
        "norm_type": "layer_norm",
        "positions": "learned",
        "feed_forward_dropout_rate": 0.0,
        "attention_bias": True,
        "feed_forward_bias": True,
        "embedding_scale": False,
        "scale_scores": True,
    },
)


def encoder(model: bert.BertConfig) -> list[Entry]:
    """Return the entries of `Bert`."""
    layer = "bert.encoder.layer.{}"
    ours = "bert/encoder/layers"
    return [
        Entry(
            "bert/embedding/table",
            "bert.embeddings.word_embeddings.weight",
            rows=model.vocab_size,
        ),
        Entry("bert/segments", "bert.embeddings.token_type_embeddings.weight"),
        Entry("bert/positions/table", "bert.embeddings.position_embeddings.weight"),
        *norm("bert/norm", "bert.embeddings.LayerNorm"),
        *linear(f"{ours}/self_attention/query", f"{layer}.attention.self.query"),
        *linear(f"{ours}/self_attention/key", f"{layer}.attention.self.key"),
        *linear(f"{ours}/self_attention/value", f"{layer}.attention.self.value"),
        *linear(
            f"{ours}/self_attention/output", f"{layer}.attention.output.dense", JOINING
        ),
        *norm(
            f"{ours}/self_attention_residual/layer_norm",
            f"{layer}.attention.output.LayerNorm",
        ),
        *linear(f"{ours}/feed_forward/inner", f"{layer}.intermediate.dense"),
        *linear(f"{ours}/feed_forward/outer", f"{layer}.output.dense"),
        *norm(f"{ours}/feed_forward_residual/layer_norm", f"{layer}.output.LayerNorm"),
        *linear("bert/pooler", "bert.pooler.dense"),
    ]


def pretraining(model: bert.BertConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Pretraining`.

    Their class 0 of the next sentence is our class 1.
    """
    return [
        *encoder(model),
        *linear("masked_lm/transform", "cls.predictions.transform.dense"),
        *norm("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        Entry("masked_lm/bias", "cls.predictions.bias", rows=model.vocab_size),
        *linear(
            "next_sentence",
            "cls.seq_relationship",
            Layout(1, transposed=True, order=(1, 0)),
        ),
    ]


def with_head(
    model: bert.BertConfig, outputs: Outputs, *, name: str = "classifier"
) -> list[Entry]:
    """Return the entries of an encoder with a linear map called `name`."""
    kernel, bias = linear(
        "head", name, Layout(LINEAR.inputs, LINEAR.transposed, order=outputs.order)
    )
    never = dataclasses.replace(bias.layout, absent=NEVER)
    return [*encoder(model), kernel, dataclasses.replace(bias, layout=never)]


def _pretraining(model: bert.BertConfig, outputs: int) -> nn.Module:
    return bert.Pretraining(model)


TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

_architecture: Any = functools.partial(
    Architecture,
    model_type="bert",
    config=CONFIG,
    prefix="bert.",
    around=(True, True),
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
    # the decoder is tied to the embedding
    unused=r".*position_ids|cls\.predictions\.decoder\.(weight|bias)",
)
_with_head: Any = functools.partial(
    _architecture, table=with_head, module=bert.Classifier
)
_with_tags: Any = functools.partial(
    _architecture, module=bert.TokenClassifier, lacks=("bert/pooler",)
)
_pretrained: Any = functools.partial(
    _architecture,
    task="bert_pretraining",
    module=_pretraining,
    table=pretraining,
    ties=TIED,
)
ALONE = Fixed(settings={"masking.next_sentence": False})

ARCHITECTURES = (
    _pretrained(
        "BertForPreTraining", head=Fixed(settings={"masking.next_sentence": True})
    ),
    _pretrained("BertForMaskedLM", head=ALONE, lacks=("bert/pooler", "next_sentence")),
    _pretrained(
        "BertModel",
        head=ALONE,
        lacks=("masked_lm", "next_sentence"),
        optional=("bert/pooler",),
        bare=True,
    ),
    _with_head("BertForSequenceClassification", task="classification", head=Classes()),
    _with_head("BertForSequenceClassification", task="regression", head=Value()),
    _with_head(
        "BertForMultipleChoice", task="multiple_choice", head=Fixed(("choice",))
    ),
    _with_tags(
        "BertForTokenClassification", task="tagging", table=with_head, head=Tags()
    ),
    _with_tags(
        "BertForQuestionAnswering",
        task="question_answering",
        table=functools.partial(with_head, name="qa_outputs"),
        head=Fixed(("start", "end")),
    ),
)
