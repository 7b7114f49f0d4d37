"""T5 of transformers (`T5ForConditionalGeneration`), as `models.transformer`.

Both versions are supported, also as one of them is written by transformers 5: there,
tie_word_embeddings is always true, and scale_decoder_outputs tells the versions apart.

Differs: The decoder never writes the id of padding, with which it begins, nor ids that
only fill up the embedding. Without a limit in the folder, outputs have up to
n_positions tokens.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from transformer_jax.interop import generation
from transformer_jax.interop.architecture import Architecture, ConfigMap, Json, Outputs
from transformer_jax.interop.layouts import JOINING, LINEAR, Entry
from transformer_jax.interop.marian import SEARCH, Translation, special_ids_of
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models import t5
from transformer_jax.models.transformer import Transformer, TransformerConfig

# feed_forward_proj → our feed_forward and activation. Their "gated-gelu" is the tanh
# approximation, and their "gelu" is not.
FEED_FORWARDS = {
    "relu": ("plain", "relu"),
    "gelu": ("plain", "gelu"),
    "gelu_new": ("plain", "gelu_tanh"),
    "silu": ("plain", "silu"),
    "gated-gelu": ("gated", "gelu_tanh"),
    "gated-relu": ("gated", "relu"),
    "gated-silu": ("gated", "silu"),
}
# the linear maps of a sub-layer: our name → their name and its layout there
ATTENTION = {
    "query": ("q", LINEAR),
    "key": ("k", LINEAR),
    "value": ("v", LINEAR),
    "output": ("o", JOINING),
}
PLAIN = {"inner": ("wi", LINEAR), "outer": ("wo", LINEAR)}
GATED = {"gate": ("wi_0", LINEAR), "inner": ("wi_1", LINEAR), "outer": ("wo", LINEAR)}
# the keys of config.json that repeat what feed_forward_proj says
ACTIVATION = "dense_act_fn"
IS_GATED = "is_gated_act"
TIED = "tie_word_embeddings"
SCALED = "scale_decoder_outputs"


class _T5Map(ConfigMap):
    """A map with one key for the kind of feed-forward network and its activation, and
    one for whether the output layer is tied and scaled.
    """

    def fields(self, config: Json) -> dict[str, Any]:
        fields = super().fields(config)
        layers = fields["num_encoder_layers"]
        fields["num_decoder_layers"] = fields["num_decoder_layers"] or layers
        version = "v1_0" if _is_tied(config) else "v1_1"
        for key in ("tie_embeddings", "output_scale"):
            fields[key] = t5.VERSIONS[version][key]
        return fields | _feed_forward(config)

    def write(self, model: TransformerConfig) -> dict[str, Any]:
        kinds = {kind: name for name, kind in FEED_FORWARDS.items()}
        kind = (model.feed_forward, model.activation)
        if kind not in kinds:
            raise InteropError(
                f"config.model.activation = {model.activation!r} with "
                f"config.model.feed_forward = {model.feed_forward!r}: "
                f"transformers has only {', '.join(FEED_FORWARDS)}"
            )
        tied = model.tie_embeddings == "all"
        version = t5.VERSIONS["v1_0" if tied else "v1_1"]
        for key in ("tie_embeddings", "output_scale"):
            if (value := getattr(model, key)) != version[key]:
                raise InteropError(
                    f"config.model.{key} = {value!r}: must be {version[key]!r} with "
                    f"config.model.tie_embeddings = {model.tie_embeddings!r}, because "
                    "transformers scales the output if it is tied, and then only"
                )
        return super().write(model) | {"feed_forward_proj": kinds[kind], TIED: tied}


def _is_tied(config: Json) -> bool:
    """Return True for version 1.0: the output layer is the embedding, and reads scaled
    vectors.
    """
    tied = config.get(TIED, True)
    scaled = config.get(SCALED, tied)
    if scaled and not tied:
        raise InteropError(
            f"config.json: {SCALED} = {scaled!r} is not supported with {TIED} = "
            f"{tied!r}: set it to False, as in T5 1.1"
        )
    return bool(tied and scaled)


def _feed_forward(config: Json) -> dict[str, Any]:
    """Return the fields for feed_forward_proj.

    Raises InteropError for one that is unknown, or if other keys say something else.
    """
    name = config.get("feed_forward_proj", "relu")
    if name not in list(FEED_FORWARDS):
        raise InteropError(
            f"config.json: feed_forward_proj = {name!r} is not supported: "
            f"choose from {', '.join(FEED_FORWARDS)}"
        )
    gated = name.startswith("gated-")
    activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    for key, value in ((IS_GATED, gated), (ACTIVATION, activation)):
        if config.get(key, value) != value:
            raise InteropError(
                f"config.json: {key} = {config[key]!r}: must be {value!r} with "
                f"feed_forward_proj = {name!r}; remove the key or change that one"
            )
    kind, ours = FEED_FORWARDS[name]
    return {"feed_forward": kind, "activation": ours}


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from other fields: T5 has one vocabulary, one width of heads
    and one rate of dropout.
    """
    return {
        "target_vocab_size": fields["source_vocab_size"],
        "value_dim": fields["head_dim"],
        **t5.dropout(fields["dropout_rate"]),
    }


CONFIG = _T5Map(
    TransformerConfig,
    names={
        "vocab_size": ("source_vocab_size", 32128),
        "d_model": ("d_model", 512),
        "d_kv": ("head_dim", 64),
        "d_ff": ("d_ff", 2048),
        "num_layers": ("num_encoder_layers", 6),
        "num_decoder_layers": ("num_decoder_layers", None),
        "num_heads": ("num_heads", 8),
        "relative_attention_num_buckets": ("relative_buckets", 32),
        "relative_attention_max_distance": ("max_bucket_distance", 128),
        "dropout_rate": ("dropout_rate", 0.1),
        "layer_norm_epsilon": ("norm_epsilon", 1e-6),
    },
    ours={
        "architecture": "transformer",
        "num_kv_heads": 0,
        "norm": "pre",
        "norm_type": "rms_norm",
        "positions": "relative_bias",
        "attention_bias": False,
        "feed_forward_bias": False,
        "output_bias": False,
        "scale_scores": False,
        "embedding_scale": False,
        "embedding_norm": False,
    },
    derived=_derived,
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    # n_positions is the length in pre-training; there is no limit
    more=("feed_forward_proj", IS_GATED, ACTIVATION, TIED, SCALED, "n_positions"),
)


def table(model: TransformerConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Transformer`."""
    rows = model.target_vocab_size
    entries = [
        Entry("target_embedding/table", "shared.weight", rows=rows),
        *_stack("encoder", model),
        *_stack("decoder", model),
    ]
    if model.has_output_layer:
        entries.append(Entry("output/table", "lm_head.weight", rows=rows))
    return entries


def _stack(name: str, model: TransformerConfig) -> list[Entry]:
    feed_forward = GATED if model.feed_forward == "gated" else PLAIN
    sub_layers = [("self_attention", "SelfAttention", ATTENTION)]
    if name == "decoder":
        sub_layers.append(("cross_attention", "EncDecAttention", ATTENTION))
    sub_layers.append(("feed_forward", "DenseReluDense", feed_forward))
    first = f"{name}.block.0.layer.0.SelfAttention"
    entries = [
        Entry(f"{name}/relative_bias/table", f"{first}.relative_attention_bias.weight"),
        Entry(f"{name}/final_norm/scale", f"{name}.final_layer_norm.weight"),
    ]
    for number, (ours, theirs, maps) in enumerate(sub_layers):
        layer = f"{name}.block.{{}}.layer.{number}"
        norm = f"{name}/layers/{ours}_residual/rms_norm/scale"
        entries.append(Entry(norm, f"{layer}.layer_norm.weight"))
        for part, (tensor, layout) in maps.items():
            path = f"{name}/layers/{ours}/{part}/kernel"
            entries.append(Entry(path, f"{layer}.{theirs}.{tensor}.weight", layout))
    return entries


def _special_ids(ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return keys of config.json."""
    keys = special_ids_of(ids, "T5")
    del keys["forced_eos_token_id"]
    return keys


def _module(model: TransformerConfig, outputs: int) -> nn.Module:
    return Transformer(model)


def _example(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tokens, tokens


ARCHITECTURES = (
    Architecture(
        "T5ForConditionalGeneration",
        "t5",
        "sequence_to_sequence",
        CONFIG,
        module=_module,
        table=table,
        head=Translation(forced_end=None, longest=("n_positions", 512)),
        special_ids=_special_ids,
        around=(False, True),
        example=_example,
        # Tables that are tied to others, and one that old files have without using it.
        unused=(
            r"(en|de)coder\.embed_tokens\.weight|lm_head\.weight"
            r"|decoder\.block\.0\.layer\.1\.EncDecAttention"
            r"\.relative_attention_bias\.weight"
        ),
        ties={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
        # transformers 5 always ties them, unless a file has both
        copies={"lm_head.weight": "shared.weight"},
        more={"is_encoder_decoder": True},
        generates=generation.RULES | generation.OF_DECODERS | SEARCH,
    ),
)
