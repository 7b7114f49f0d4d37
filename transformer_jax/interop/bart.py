"""BART and mBART of transformers (`BartForConditionalGeneration`,
`MBartForConditionalGeneration`), as `models.transformer`.

Lewis et al. 2020; Liu et al. 2020. Both have learned positions, which begin in the
third row of their tables, and a norm of the sums of embeddings and positions. BART is
post-LN; mBART is pre-LN with final norms.

Differs: The last bias is a buffer in transformers and stays as it is in training; here,
it is a parameter. Look-ups of the padding id train its row here, and not in
transformers.
"""

import functools
from collections.abc import Mapping
from typing import Any

from transformer_jax.interop import marian
from transformer_jax.interop.architecture import Architecture, Outputs, widths
from transformer_jax.interop.layouts import ROW, Entry, norm
from transformer_jax.models.transformer import TransformerConfig

SKIPPED = 2  # rows before that of the first position
END = 2  # forced_eos_token_id of a folder that names none


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    return widths(fields) | {"target_vocab_size": fields["source_vocab_size"]}


def _config(place: str) -> marian.TwoStacksMap:
    """Return the map of a model whose norms are at `place`, "post" or "pre"."""
    is_pre = place == "pre"
    return marian.TwoStacksMap(
        TransformerConfig,
        names={"vocab_size": ("source_vocab_size", 50265), **marian.NAMES},
        choices=marian.CHOICES,
        theirs=marian.THEIRS
        | {
            "add_final_layer_norm": is_pre,
            "normalize_before": is_pre,
            "normalize_embedding": True,
            "static_position_embeddings": False,
            "extra_pos_embeddings": SKIPPED,
            "tie_word_embeddings": True,
        },
        ours=marian.OURS
        | {
            "norm": place,
            "positions": "learned",
            "embedding_norm": True,
            "tie_embeddings": "all",
        },
        derived=_derived,
        aliases=marian.ALIASES,
        more=marian.OF_DECODER,
    )


def table(model: TransformerConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Transformer`."""
    rows = model.target_vocab_size
    entries = [
        Entry("target_embedding/table", "model.shared.weight", rows=rows),
        Entry("output_bias", "final_logits_bias", ROW, rows=rows),
    ]
    for side, name in (("source", "encoder"), ("target", "decoder")):
        positions = f"model.{name}.embed_positions.weight"
        entries += [
            Entry(f"{side}_positions/table", positions, skipped=SKIPPED),
            *norm(f"{side}_norm", f"model.{name}.layernorm_embedding"),
            *marian.stack(name),
        ]
        if model.norm == "pre":
            entries += norm(f"{name}/final_norm", f"model.{name}.layer_norm")
    return entries


def _family(name: str, model_type: str, place: str) -> Architecture:
    return marian.architecture(
        f"{name}ForConditionalGeneration",
        model_type,
        config=_config(place),
        table=table,
        head=marian.Translation(forced_end=END),
        optional=("output_bias",),
        special_ids=functools.partial(marian.special_ids_of, family=name),
        framed=True,
        # tables that are tied to others, and numbers of versions in old files
        unused=(r"model\.(en|de)coder\.(embed_tokens\.weight|version)|lm_head\.weight"),
    )


ARCHITECTURES = (
    _family("Bart", "bart", "post"),
    _family("MBart", "mbart", "pre"),
)
