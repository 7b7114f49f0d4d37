"""ELECTRA of transformers (`ElectraModel` and its heads; Clark et al. 2020), as
`models.bert` and `models.electra`.

`ElectraForPreTraining` is the discriminator, and `ElectraForMaskedLM` the generator.
The embeddings may have a width of their own. The pooler is a part of the heads for
classes and choices, and ends in a GELU.
"""

import functools
from typing import Any

import flax.linen as nn

from transformer_jax.interop import bert as bert_tables
from transformer_jax.interop.architecture import (
    Architecture,
    ConfigMap,
    FieldError,
    Json,
    Outputs,
)
from transformer_jax.interop.layouts import Entry, linear, norm
from transformer_jax.models import bert
from transformer_jax.models.electra import Electra


class _ElectraMap(ConfigMap):
    """A map of the width of the embeddings, for which we have 0 if it is d_model."""

    def fields(self, config: Json) -> dict[str, Any]:
        fields = super().fields(config)
        width = fields["embedding_dim"]
        if width < 1:
            raise FieldError("embedding_dim", width, "must be at least 1")
        return fields | {"embedding_dim": 0 if width == fields["d_model"] else width}

    def write(self, model: bert.BertConfig) -> dict[str, Any]:
        return super().write(model) | {"embedding_size": model.embedding_width}


CONFIG = _ElectraMap(
    bert.BertConfig,
    names={
        "vocab_size": ("vocab_size", 30522),
        "type_vocab_size": ("num_segments", 2),
        **bert_tables.SIZES,
        "embedding_size": ("embedding_dim", 128),
        "hidden_size": ("d_model", 256),
        "num_attention_heads": ("num_heads", 4),
        "intermediate_size": ("d_ff", 1024),
    },
    # the generator's head and that for classes have no other
    choices={"hidden_act": ("activation", "gelu", {"gelu": "gelu"})},
    theirs=bert_tables.THEIRS
    | {
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
    },
    ours={
        key: value
        for key, value in bert_tables.COMMON.items()
        if key != "embedding_dim"
    }
    | {"pooler_activation": "gelu"},
    derived=bert_tables.widths_of_pairs,
    more=("summary_last_dropout",),
)


def encoder(
    model: bert.BertConfig,
    outputs: Outputs | None = None,
    *,
    pooler: str = "classifier.dense",
) -> list[Entry]:
    """Return the entries of `Bert`, whose pooler is `pooler` in theirs."""
    return bert_tables.encoder(model, name="electra", pooler=pooler)


def masked_lm(model: bert.BertConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Pretraining`, whose next sentence a file lacks."""
    return [
        *encoder(model),
        *linear("masked_lm/transform", "generator_predictions.dense"),
        *norm("masked_lm/norm", "generator_predictions.LayerNorm"),
        Entry("masked_lm/bias", "generator_lm_head.bias", rows=model.vocab_size),
        *bert_tables.NEXT_SENTENCE,
    ]


def replaced_tokens(model: bert.BertConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Electra` without a generator, which has no pooler."""
    head = "discriminator_predictions"
    return [
        *(entry for entry in encoder(model) if "/pooler/" not in entry.ours),
        *linear("replaced_tokens/transform", f"{head}.dense"),
        *linear("replaced_tokens/output", f"{head}.dense_prediction"),
    ]


def _discriminator(model: bert.BertConfig, outputs: int) -> nn.Module:
    return Electra(model)


def _made(name: str, **fields: Any) -> Architecture:
    return Architecture(
        f"Electra{name}",
        "electra",
        config=CONFIG,
        prefix="electra.",
        around=(True, True),
        ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        unused=r".*position_ids|generator_lm_head\.weight",
        **fields,
    )


_with_head: Any = bert_tables.with_head
ARCHITECTURES = (
    _made(
        "ForPreTraining",
        task="electra_pretraining",
        module=_discriminator,
        table=replaced_tokens,
        lacks=("generator",),
    ),
    *bert_tables.family(
        _made,
        masked_lm=masked_lm,
        whole=functools.partial(_with_head, name="classifier.out_proj", body=encoder),
        choice=functools.partial(
            _with_head,
            body=functools.partial(encoder, pooler="sequence_summary.summary"),
        ),
        body=encoder,
        has_pooler=False,
    ),
)
