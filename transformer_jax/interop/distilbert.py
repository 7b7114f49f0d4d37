"""DistilBERT of transformers (`DistilBertModel` and its heads; Sanh et al. 2019), as
`models.bert`.

It has no segments. The pooler is a part of the head for classes, and ends in a ReLU.
"""

import functools
from collections.abc import Mapping
from typing import Any

from transformer_jax.interop import bert as bert_tables
from transformer_jax.interop.architecture import Architecture, ConfigMap, Outputs
from transformer_jax.interop.layouts import JOINING, Entry, linear, norm
from transformer_jax.models import bert

CONFIG = ConfigMap(
    bert.BertConfig,
    names={
        "vocab_size": ("vocab_size", 30522),
        "dim": ("d_model", 768),
        "n_layers": ("num_layers", 6),
        "n_heads": ("num_heads", 12),
        "hidden_dim": ("d_ff", 3072),
        "max_position_embeddings": ("max_length", 512),
        "dropout": ("dropout_rate", 0.1),
        "attention_dropout": ("attention_dropout_rate", 0.1),
    },
    choices={"activation": ("activation", "gelu", bert_tables.ACTIVATIONS)},
    theirs={"sinusoidal_pos_embds": False, "tie_word_embeddings": True},
    ours=bert_tables.COMMON
    | {"num_segments": 0, "norm_epsilon": 1e-12, "pooler_activation": "relu"},
    aliases={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    },
    # dropout of heads, and a key of old files
    more=("qa_dropout", "seq_classif_dropout", "tie_weights_"),
)


def encoder(model: bert.BertConfig) -> list[Entry]:
    """Return the entries of `Bert`."""
    embeddings = "distilbert.embeddings"
    layer = "distilbert.transformer.layer.{}"
    ours = "bert/encoder/layers"
    attention = f"{ours}/self_attention"
    return [
        Entry(
            "bert/embedding/table",
            f"{embeddings}.word_embeddings.weight",
            rows=model.vocab_size,
        ),
        Entry("bert/positions/table", f"{embeddings}.position_embeddings.weight"),
        *norm("bert/norm", f"{embeddings}.LayerNorm"),
        *linear(f"{attention}/query", f"{layer}.attention.q_lin"),
        *linear(f"{attention}/key", f"{layer}.attention.k_lin"),
        *linear(f"{attention}/value", f"{layer}.attention.v_lin"),
        *linear(f"{attention}/output", f"{layer}.attention.out_lin", JOINING),
        *norm(f"{attention}_residual/layer_norm", f"{layer}.sa_layer_norm"),
        *linear(f"{ours}/feed_forward/inner", f"{layer}.ffn.lin1"),
        *linear(f"{ours}/feed_forward/outer", f"{layer}.ffn.lin2"),
        *norm(f"{ours}/feed_forward_residual/layer_norm", f"{layer}.output_layer_norm"),
        *linear("bert/pooler", "pre_classifier"),
    ]


def masked_lm(model: bert.BertConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Pretraining`, whose next sentence a file lacks."""
    return [
        *encoder(model),
        *linear("masked_lm/transform", "vocab_transform"),
        *norm("masked_lm/norm", "vocab_layer_norm"),
        Entry("masked_lm/bias", "vocab_projector.bias", rows=model.vocab_size),
        *bert_tables.NEXT_SENTENCE,
    ]


def _special_ids(ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return keys of config.json."""
    return {} if ids.get("pad_id") is None else {"pad_token_id": ids["pad_id"]}


def _made(name: str, **fields: Any) -> Architecture:
    return Architecture(
        f"DistilBert{name}",
        "distilbert",
        config=CONFIG,
        prefix="distilbert.",
        around=(True, True),
        segments=False,
        special_ids=_special_ids,
        ties={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        unused=r".*position_ids|vocab_projector\.weight",
        **fields,
    )


_with_head: Any = functools.partial(bert_tables.with_head, body=encoder)
ARCHITECTURES = bert_tables.family(
    _made,
    masked_lm=masked_lm,
    whole=_with_head,
    choice=_with_head,
    body=encoder,
    has_pooler=False,
)
