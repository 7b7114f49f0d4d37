"""Marian of transformers (`MarianMTModel`), as `models.transformer`.

Differs: Marian's last bias is a buffer in transformers and stays as it is in training;
here, it is a parameter. Rows of the padding id in embeddings get no gradient from
look-ups in transformers; here, the decoder begins with this id, and its row is trained.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from transformer_jax.interop import generation
from transformer_jax.interop.architecture import (
    Architecture,
    ConfigMap,
    Head,
    Json,
    Outputs,
    typed,
)
from transformer_jax.interop.layouts import JOINING, ROW, Entry, linear, norm
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models.transformer import Transformer, TransformerConfig

# early_stopping → decoding.stopping_rule
STOPPING = {False: "hf_false", True: "hf_true", "never": "hf_never"}
# (share_encoder_decoder_embeddings, tie_word_embeddings) → tie_embeddings
TIES = {(True, True): "all", (False, True): "decoder", (False, False): "none"}


SEARCH = {
    "early_stopping",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "num_beams",
}


class TwoStacksMap(ConfigMap):
    """A map with keys for the encoder and the decoder that must agree."""

    def fields(self, config: Json) -> dict[str, Any]:
        for ours, default in (("attention_heads", 16), ("ffn_dim", 4096)):
            keys = [f"{stack}_{ours}" for stack in ("encoder", "decoder")]
            encoder, decoder = (config.get(key, default) for key in keys)
            if encoder != decoder:
                raise InteropError(
                    f"config.json: {keys[0]} = {encoder} "
                    f"and {keys[1]} = {decoder} are unsupported: they must be equal"
                )
        return super().fields(config)

    def write(self, model: TransformerConfig) -> dict[str, Any]:
        return super().write(model) | {
            "decoder_attention_heads": model.num_heads,
            "decoder_ffn_dim": model.d_ff,
        }


class _MarianMap(TwoStacksMap):
    """A map with two keys for what is tied."""

    def fields(self, config: Json) -> dict[str, Any]:
        shares_embeddings = config.get("share_encoder_decoder_embeddings", True)
        sharing = (shares_embeddings, config.get("tie_word_embeddings", True))
        if sharing not in TIES:
            raise InteropError(
                "config.json: tie_word_embeddings = False "
                "is not supported with share_encoder_decoder_embeddings = True"
            )
        fields = super().fields(config)
        source = fields["source_vocab_size"]
        target = fields["target_vocab_size"] or source
        if shares_embeddings and target != source:
            raise InteropError(
                f"config.json: decoder_vocab_size = {target}: must be vocab_size = "
                f"{source}, or set share_encoder_decoder_embeddings to False"
            )
        return fields | {"target_vocab_size": target, "tie_embeddings": TIES[sharing]}

    def write(self, model: TransformerConfig) -> dict[str, Any]:
        sharings = {value: key for key, value in TIES.items()}
        if model.tie_embeddings not in sharings:
            raise InteropError(
                f"config.model.tie_embeddings = {model.tie_embeddings!r}: "
                f"transformers has only {', '.join(sharings)}"
            )
        sharing = sharings[model.tie_embeddings]
        return super().write(model) | {
            "share_encoder_decoder_embeddings": sharing[0],
            "tie_word_embeddings": sharing[1],
        }


# The config of Marian, BART and mBART.
NAMES = {
    "d_model": ("d_model", 1024),
    "encoder_layers": ("num_encoder_layers", 12),
    "decoder_layers": ("num_decoder_layers", 12),
    "encoder_attention_heads": ("num_heads", 16),
    "encoder_ffn_dim": ("d_ff", 4096),
    "max_position_embeddings": ("max_length", 1024),
    "dropout": ("dropout_rate", 0.1),
    "attention_dropout": ("attention_dropout_rate", 0.0),
    "activation_dropout": ("feed_forward_dropout_rate", 0.0),
    "scale_embedding": ("embedding_scale", False),
}
CHOICES = {
    "activation_function": (
        "activation",
        "gelu",
        {
            "gelu": "gelu",
            "gelu_new": "gelu_tanh",
            "relu": "relu",
            "swish": "silu",
            "silu": "silu",
        },
    )
}
THEIRS = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "add_bias_logits": False,
}
OURS = {
    "architecture": "transformer",
    "num_kv_heads": 0,
    "feed_forward": "plain",
    "norm_type": "layer_norm",
    "norm_epsilon": 1e-5,
    "attention_bias": True,
    "feed_forward_bias": True,
    "output_bias": True,
    "scale_scores": True,
    "output_scale": False,
    "final_dropout_rate": 0.0,
}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
}
OF_DECODER = ("decoder_attention_heads", "decoder_ffn_dim")

CONFIG = _MarianMap(
    TransformerConfig,
    names={
        "vocab_size": ("source_vocab_size", 58101),
        "decoder_vocab_size": ("target_vocab_size", None),
        **NAMES,
    },
    choices=CHOICES,
    theirs=THEIRS
    | {
        "add_final_layer_norm": False,
        "normalize_before": False,
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "extra_pos_embeddings": 0,
    },
    ours=OURS
    | {"norm": "post", "positions": "sinusoidal_halves", "embedding_norm": False},
    aliases=ALIASES,
    more=(*OF_DECODER, "share_encoder_decoder_embeddings", "tie_word_embeddings"),
)


def table(model: TransformerConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of `Transformer`."""
    source = model.source_vocab_size
    target = model.target_vocab_size
    untied = model.tie_embeddings == "none"
    bias = Entry(
        "output/bias" if untied else "output_bias",
        "final_logits_bias",
        ROW,
        rows=target,
    )
    return [
        *_embeddings(model, source, target),
        bias,
        *stack("encoder"),
        *stack("decoder"),
    ]


def _embeddings(model: TransformerConfig, source: int, target: int) -> list[Entry]:
    if model.tie_embeddings == "all":
        return [Entry("target_embedding/table", "model.shared.weight", rows=target)]
    encoder = "model.encoder.embed_tokens.weight"
    decoder = "model.decoder.embed_tokens.weight"
    entries = [
        Entry("source_embedding/table", encoder, rows=source),
        Entry("target_embedding/table", decoder, rows=target),
    ]
    if model.tie_embeddings == "none":
        entries.append(Entry("output/table", "lm_head.weight", rows=target))
    return entries


def stack(name: str) -> list[Entry]:
    """Return the entries of the layers of a stack, "encoder" or "decoder"."""
    ours = f"{name}/layers"
    theirs = f"model.{name}.layers.{{}}"
    attentions = {"self_attention": "self_attn"}
    if name == "decoder":
        attentions["cross_attention"] = "encoder_attn"
    entries = [
        *linear(f"{ours}/feed_forward/inner", f"{theirs}.fc1"),
        *linear(f"{ours}/feed_forward/outer", f"{theirs}.fc2"),
        *norm(f"{ours}/feed_forward_residual/layer_norm", f"{theirs}.final_layer_norm"),
    ]
    for attention, called in attentions.items():
        for part in ("query", "key", "value"):
            entries += linear(
                f"{ours}/{attention}/{part}", f"{theirs}.{called}.{part[0]}_proj"
            )
        entries += linear(
            f"{ours}/{attention}/output", f"{theirs}.{called}.out_proj", JOINING
        )
        entries += norm(
            f"{ours}/{attention}_residual/layer_norm", f"{theirs}.{called}_layer_norm"
        )
    return entries


@dataclasses.dataclass(frozen=True)
class Translation(Head):
    """The output layer of the decoder of an encoder–decoder.

    Its settings are those of `generate`: beams, length penalty and lengths.

    forced_end: the forced_eos_token_id of a folder that names none; None if outputs
        that reach the limit are ranked as they are.
    longest: the key of config.json for the longest output if `generate` has no limit,
        and its default.
    """

    forced_end: int | None = 0
    longest: tuple[str, int] = ("max_position_embeddings", 1024)

    def read(self, config: Json) -> Outputs:
        given = {key: value for key, value in config.items() if value is not None}
        for key, least in (("num_beams", 1), ("max_length", 2), ("max_new_tokens", 1)):
            if typed(given, key, least, int) < least:
                where = "generation_config.json or config.json"
                raise InteropError(
                    f"{where}: {key} = {given[key]}: must be at least {least}"
                )
        stopping = given.get("early_stopping", False)
        limit = given.get("max_length")
        if "max_new_tokens" in given:
            limit = given["max_new_tokens"] + 1
        if stopping not in list(STOPPING):
            choices = ", ".join(map(repr, STOPPING))
            raise InteropError(
                f"config.json: early_stopping = {stopping!r} is not supported: "
                f"choose from {choices}"
            )
        ours = {
            "beam_size": given.get("num_beams", 1),
            "length_penalty": typed(given, "length_penalty", 1.0, float),
            "length_penalty_form": "power",
            "stopping_rule": STOPPING[stopping],
            "at_limit": (
                "rank"
                if config.get("forced_eos_token_id", self.forced_end) is None
                else "end"
            ),
            "max_ratio": 0.0,
            # theirs counts the first
            "max_extra": limit - 1 if limit else given.get(*self.longest),
        }
        ours |= generation.rules_of_decoders(config)
        return Outputs(
            settings={f"decoding.{key}": value for key, value in ours.items()}
        )

    def generation(
        self, settings: Mapping[str, Any], special_ids: Mapping[str, int | None]
    ) -> dict[str, Any]:
        """Return the content of generation_config.json.

        Of the length penalties, only "power" exists there, and only the stopping rules
        of Hugging Face.
        """
        ours = {key.removeprefix("decoding."): value for key, value in settings.items()}
        keys = special_ids_of(special_ids)
        rule = {rule: value for value, rule in STOPPING.items()}
        begin = keys["decoder_start_token_id"]
        end = keys["eos_token_id"]
        pad = keys["pad_token_id"]
        content = keys | {
            "bad_words_ids": [[i] for i in sorted({begin, pad} - {end})],
            "forced_eos_token_id": end if ours.get("at_limit") == "end" else None,
            "num_beams": ours.get("beam_size", 1),
            "early_stopping": rule.get(str(ours.get("stopping_rule")), False),
        }
        if ours.get("length_penalty_form") == "power":
            content["length_penalty"] = ours["length_penalty"]
        if ours.get("max_ratio") == 0:
            content["max_length"] = ours["max_extra"] + 1
        return content | generation.keys_of(ours, end)


def special_ids_of(
    ids: Mapping[str, int | None], family: str = "Marian"
) -> dict[str, Any]:
    """Return keys of config.json for a `family` of models. A vocabulary without padding
    is padded with its end.
    """
    if ids.get("eos_id") is None:
        raise InteropError(
            f"the tokenizer has no end id, which {family} needs: "
            "use a tokenizer that has one"
        )
    end = ids["eos_id"]
    begin, pad = (
        end if ids[name] is None else ids[name] for name in ("bos_id", "pad_id")
    )
    return {
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "decoder_start_token_id": begin,
        "forced_eos_token_id": end,
    }


def _module(model: TransformerConfig, outputs: int) -> nn.Module:
    return Transformer(model)


def _example(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tokens, tokens


def architecture(name: str, model_type: str, **fields: Any) -> Architecture:
    """Return a class of encoder–decoders whose tables have Marian's names."""
    return Architecture(
        name,
        model_type,
        "sequence_to_sequence",
        module=_module,
        around=(False, True),
        example=_example,
        ties={
            "lm_head.weight": "model.shared.weight",
            "model.decoder.embed_tokens.weight": "model.shared.weight",
            "model.encoder.embed_tokens.weight": "model.shared.weight",
        },
        more={"is_encoder_decoder": True},
        generates=generation.RULES | generation.OF_DECODERS | SEARCH,
        **fields,
    )


ARCHITECTURES = (
    architecture(
        "MarianMTModel",
        "marian",
        config=CONFIG,
        table=table,
        head=Translation(),
        special_ids=special_ids_of,
        # Fixed tables of positions, and tables that are tied to others.
        unused=r"model\.(en|de)coder\.embed_(positions|tokens)\.weight|lm_head\.weight",
    ),
)
