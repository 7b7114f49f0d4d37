"""BERT of transformers (`BertModel` and its heads), as `models.bert`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from transformer_jax.interop.architecture import (
    Architecture,
    Classes,
    ConfigMap,
    FieldError,
    Fixed,
    Outputs,
    Tags,
    Value,
    widths,
)
from transformer_jax.interop.layouts import JOINING, LINEAR, Entry, Layout, linear, norm
from transformer_jax.models import bert

NEVER = -1e4  # the bias of outputs that a folder lacks, so that they are not predicted
# Keys of BERT and of its descendants.
SIZES = {
    "hidden_size": ("d_model", 768),
    "num_hidden_layers": ("num_layers", 12),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("d_ff", 3072),
    "max_position_embeddings": ("max_length", 512),
    "layer_norm_eps": ("norm_epsilon", 1e-12),
    "hidden_dropout_prob": ("dropout_rate", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout_rate", 0.1),
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
THEIRS = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
COMMON = {
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
    "embedding_dim": 0,
    "pooler_activation": "tanh",
}


def widths_of_pairs(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the widths of heads. Raises FieldError if there are no segments."""
    if (count := fields["num_segments"]) < 2:
        rule = "must be at least 2, for the two segments of a pair"
        raise FieldError("num_segments", count, rule)
    return widths(fields)


CONFIG = ConfigMap(
    bert.BertConfig,
    names={
        "vocab_size": ("vocab_size", 30522),
        "type_vocab_size": ("num_segments", 2),
        **SIZES,
    },
    choices={"hidden_act": ("activation", "gelu", ACTIVATIONS)},
    theirs=THEIRS,
    ours=COMMON,
    derived=widths_of_pairs,
)


def encoder(
    model: bert.BertConfig,
    outputs: Outputs | None = None,
    *,
    name: str = "bert",
    pooler: str = "bert.pooler.dense",
    skipped: int = 0,
) -> list[Entry]:
    """Return the entries of `Bert`, which is called `name` in theirs.

    `skipped` rows of their positions come before ours.
    """
    layer = f"{name}.encoder.layer.{{}}"
    embeddings = f"{name}.embeddings"
    ours = "bert/encoder/layers"
    projection = linear("bert/embeddings_project", f"{name}.embeddings_project")
    if not model.embedding_dim:
        projection = []
    return [
        Entry(
            "bert/embedding/table",
            f"{embeddings}.word_embeddings.weight",
            rows=model.vocab_size,
        ),
        Entry("bert/segments", f"{embeddings}.token_type_embeddings.weight"),
        Entry(
            "bert/positions/table",
            f"{embeddings}.position_embeddings.weight",
            skipped=skipped,
        ),
        *norm("bert/norm", f"{embeddings}.LayerNorm"),
        *projection,
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
        *linear("bert/pooler", pooler),
    ]


# Their class 0 of the next sentence is our class 1.
NEXT_SENTENCE = linear(
    "next_sentence", "cls.seq_relationship", Layout(1, transposed=True, order=(1, 0))
)


def pretraining(model: bert.BertConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Pretraining`."""
    return [
        *encoder(model),
        *linear("masked_lm/transform", "cls.predictions.transform.dense"),
        *norm("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        Entry("masked_lm/bias", "cls.predictions.bias", rows=model.vocab_size),
        *NEXT_SENTENCE,
    ]


def with_head(
    model: bert.BertConfig,
    outputs: Outputs,
    *,
    name: str = "classifier",
    body: Callable[[bert.BertConfig], list[Entry]] = encoder,
) -> list[Entry]:
    """Return the entries of an encoder with a linear map called `name`."""
    kernel, bias = linear(
        "head", name, Layout(LINEAR.inputs, LINEAR.transposed, order=outputs.order)
    )
    never = dataclasses.replace(bias.layout, absent=NEVER)
    return [*body(model), kernel, dataclasses.replace(bias, layout=never)]


def pretraining_module(model: bert.BertConfig, outputs: int) -> nn.Module:
    """Return the model with the heads of pre-training."""
    return bert.Pretraining(model)


ALONE = Fixed(settings={"masking.next_sentence": False})


def family(
    made: Callable[..., Architecture],
    *,
    masked_lm: Callable[[bert.BertConfig, Outputs], list[Entry]],
    whole: Callable[[bert.BertConfig, Outputs], list[Entry]],
    choice: Callable[[bert.BertConfig, Outputs], list[Entry]],
    body: Callable[[bert.BertConfig], list[Entry]] = encoder,
    has_pooler: bool = True,
) -> tuple[Architecture, ...]:
    """Return the classes that BERT and its descendants have.

    Args:
        made: (end of a name, fields) → a class.
        masked_lm: the table of `Pretraining`.
        whole: the table of a `Classifier`.
        choice: the table of a `Classifier` with one output for each choice.
        body: the table of `Bert`.
        has_pooler: the model without a head may have a pooler.
    """
    pooler = ("bert/pooler",)
    pretrained = functools.partial(
        made,
        task="bert_pretraining",
        head=ALONE,
        module=pretraining_module,
        table=masked_lm,
    )
    classifier = functools.partial(made, module=bert.Classifier)
    of_tokens = functools.partial(made, module=bert.TokenClassifier, lacks=pooler)
    answers = functools.partial(with_head, name="qa_outputs", body=body)
    tags = functools.partial(with_head, body=body)
    choices = Fixed(("choice",))
    ends = Fixed(("start", "end"))
    return (
        pretrained("ForMaskedLM", lacks=("bert/pooler", "next_sentence")),
        pretrained(
            "Model",
            lacks=("masked_lm", "next_sentence", *(() if has_pooler else pooler)),
            optional=pooler if has_pooler else (),
            bare=True,
        ),
        classifier(
            "ForSequenceClassification",
            task="classification",
            table=whole,
            head=Classes(),
        ),
        classifier(
            "ForSequenceClassification", task="regression", table=whole, head=Value()
        ),
        classifier(
            "ForMultipleChoice", task="multiple_choice", table=choice, head=choices
        ),
        of_tokens("ForTokenClassification", task="tagging", table=tags, head=Tags()),
        of_tokens(
            "ForQuestionAnswering", task="question_answering", table=answers, head=ends
        ),
    )


def _made(name: str, **fields: Any) -> Architecture:
    return Architecture(
        f"Bert{name}",
        "bert",
        config=CONFIG,
        prefix="bert.",
        around=(True, True),
        renamed=((".gamma", ".weight"), (".beta", ".bias")),
        ties={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        # the decoder is tied to the embedding
        unused=r".*position_ids|cls\.predictions\.decoder\.(weight|bias)",
        **fields,
    )


ARCHITECTURES = (
    _made(
        "ForPreTraining",
        task="bert_pretraining",
        module=pretraining_module,
        table=pretraining,
        head=Fixed(settings={"masking.next_sentence": True}),
    ),
    *family(_made, masked_lm=pretraining, whole=with_head, choice=with_head),
)
