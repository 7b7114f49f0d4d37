"""RoBERTa and XLM-R of transformers (`RobertaModel`, `XLMRobertaModel` and their
heads), as `models.bert`.

Their positions count from 2, the id after that of padding, so the first two rows of
their table stand for no position. A classifier's pooler is a part of its head there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from transformer_jax.interop import bert as bert_tables
from transformer_jax.interop.architecture import (
    Architecture,
    ConfigMap,
    Head,
    Json,
    Outputs,
)
from transformer_jax.interop.layouts import Entry, linear, norm
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models import bert

PAD = 1  # the id of padding
SKIPPED = PAD + 1  # rows before that of the first position


class _RobertaMap(ConfigMap):
    """A map with a key for the positions, of which the first ones are not used."""

    def fields(self, config: Json) -> dict[str, Any]:
        fields = super().fields(config)
        return fields | {"max_length": fields["max_length"] - SKIPPED}

    def write(self, model: bert.BertConfig) -> dict[str, Any]:
        positions = model.max_length + SKIPPED
        return super().write(model) | {"max_position_embeddings": positions}


CONFIG = _RobertaMap(
    bert.BertConfig,
    names={"vocab_size": ("vocab_size", 50265), **bert_tables.SIZES},
    choices={
        # its head for masked tokens has no other
        "hidden_act": ("activation", "gelu", {"gelu": "gelu"}),
        "type_vocab_size": ("num_segments", 2, {1: 1}),
    },
    theirs=bert_tables.THEIRS | {"pad_token_id": PAD},
    ours=bert_tables.COMMON,
)


@dataclasses.dataclass(frozen=True)
class WithTokenizer(Head):
    """A head of another kind, for a model whose tokenizer is `unigram` or not."""

    kind: Head
    unigram: bool

    def read(self, config: Json) -> Outputs | None:
        return self.kind.read(config)

    def write(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        tokenizer = settings.get("data.tokenizer")
        if tokenizer is not None and (tokenizer == "unigram") != self.unigram:
            return None
        return self.kind.write(settings)


_encoder: Any = functools.partial(
    bert_tables.encoder,
    name="roberta",
    pooler="roberta.pooler.dense",
    skipped=SKIPPED,
)


def masked_lm(model: bert.BertConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Pretraining`, whose next sentence a file lacks."""
    return [
        *_encoder(model),
        *linear("masked_lm/transform", "lm_head.dense"),
        *norm("masked_lm/norm", "lm_head.layer_norm"),
        Entry("masked_lm/bias", "lm_head.bias", rows=model.vocab_size),
        *bert_tables.NEXT_SENTENCE,
    ]


def _special_ids(ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return keys of config.json. Raises InteropError for another id of padding."""
    if ids and ids["pad_id"] != PAD:
        raise InteropError(
            f"the tokenizer has the id of padding {ids['pad_id']}: must be {PAD}, "
            "because RoBERTa of transformers counts positions from the id after it; "
            "use the tokenizer of a RoBERTa or XLM-R"
        )
    return {f"{name.removesuffix('_id')}_token_id": i for name, i in ids.items()}


def _family(start: str, model_type: str, unigram: bool) -> tuple[Architecture, ...]:
    """Return the classes whose names begin with `start`."""

    def made(name: str, *, head: Head, **fields: Any) -> Architecture:
        return Architecture(
            f"{start}{name}",
            model_type,
            config=CONFIG,
            head=WithTokenizer(head, unigram),
            prefix="roberta.",
            around=(True, True),
            segments=False,
            special_ids=_special_ids,
            ties={
                "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
                "lm_head.decoder.bias": "lm_head.bias",
            },
            unused=r".*position_ids|lm_head\.decoder\.(weight|bias)",
            **fields,
        )

    with_head = bert_tables.with_head
    own_pooler = functools.partial(_encoder, pooler="classifier.dense")
    return bert_tables.family(
        made,
        masked_lm=masked_lm,
        whole=functools.partial(with_head, name="classifier.out_proj", body=own_pooler),
        choice=functools.partial(with_head, body=_encoder),
        body=_encoder,
    )


ARCHITECTURES = (
    *_family("Roberta", "roberta", unigram=False),
    *_family("XLMRoberta", "xlm-roberta", unigram=True),
)
