"""GPT (`openai-gpt`), GPT-2, Llama, Mistral, Qwen2 and Qwen3 of transformers, as
`models.gpt`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from transformer_jax.interop import generation, rope
from transformer_jax.interop.architecture import (
    Architecture,
    Classes,
    ConfigMap,
    Head,
    Json,
    Outputs,
    Value,
    typed,
    widths,
)
from transformer_jax.interop.layouts import JOINING, LINEAR, Entry, Layout, linear, norm
from transformer_jax.interop.tensors import InteropError
from transformer_jax.models import gpt

HEADS = ("query", "key", "value")
HEADS_SHARED = "num_key_value_heads"
WINDOW = "sliding_window"
# Values of ours that all of these models have. Of GPT and GPT-2 alone: COMMON.
SHARED = {
    "architecture": "gpt",
    "feed_forward_dropout_rate": 0.0,
    "embedding_scale": False,
    "scale_scores": True,
}
COMMON = SHARED | {
    "num_kv_heads": 0,
    "feed_forward": "plain",
    "norm_type": "layer_norm",
    "positions": "learned",
    "attention_bias": True,
    "feed_forward_bias": True,
}
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
SIZES = {
    "n_embd": ("d_model", 768),
    "n_layer": ("num_layers", 12),
    "n_head": ("num_heads", 12),
    "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    "resid_pdrop": ("dropout_rate", 0.1),
    "embd_pdrop": ("dropout_rate", 0.1),
    "attn_pdrop": ("attention_dropout_rate", 0.1),
    "tie_word_embeddings": ("tie_embeddings", True),
}


class GPTMap(ConfigMap):
    """The keys of GPT and GPT-2, which have two rates of dropout where we have one."""

    def fields(self, config: Json) -> dict[str, Any]:
        embeddings = config.get("embd_pdrop", 0.1)
        residuals = config.get("resid_pdrop", 0.1)
        if embeddings != residuals:
            raise InteropError(
                f"config.json: embd_pdrop = {embeddings} and resid_pdrop = {residuals} "
                "are not supported: set both to one value, which only training uses"
            )
        return super().fields(config)


class LlamaMap(ConfigMap):
    """The keys of Llama and of its descendants, some of which are null."""

    def fields(self, config: Json) -> dict[str, Any]:
        given = {key: value for key, value in config.items() if value is not None}
        nulls = {
            key: 0 for key in (HEADS_SHARED, WINDOW) if key in config.keys() - given
        }
        if (base := rope.base(given)) is not None:
            given["rope_theta"] = base
        kinds = set(typed(given, "layer_types", [], list)) - {"full_attention"}
        if kinds:
            raise InteropError(
                f"config.json: layer_types has {', '.join(map(str, sorted(kinds)))}: "
                "supported are layers of full_attention"
            )
        fields = super().fields(nulls | given) | rope.read(given)
        width = fields["head_dim"] or widths(fields)["head_dim"]
        return fields | {"head_dim": width, "value_dim": width, "dropout_rate": 0.0}

    def write(self, model: Any) -> dict[str, Any]:
        config = super().write(model)
        heads = config[HEADS_SHARED] or config["num_attention_heads"]
        if WINDOW in config:
            config[WINDOW] = config[WINDOW] or None
        return config | {HEADS_SHARED: heads, "rope_parameters": rope.write(model)}


def _wider(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return what follows from d_model in GPT-2, where the inner width may be null."""
    return widths(fields) | {"d_ff": fields["d_ff"] or 4 * fields["d_model"]}


OPENAI = GPTMap(
    gpt.GPTConfig,
    names={
        "vocab_size": ("vocab_size", 40478),
        "n_positions": ("max_length", 512),
        **SIZES,
    },
    choices={
        # Their "gelu" is the approximation.
        "afn": (
            "activation",
            "gelu",
            {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
        )
    },
    ours=COMMON | {"norm": "post"},
    derived=lambda fields: widths(fields) | {"d_ff": 4 * fields["d_model"]},
    aliases=ALIASES,
)
GPT2 = GPTMap(
    gpt.GPTConfig,
    names={
        "vocab_size": ("vocab_size", 50257),
        "n_positions": ("max_length", 1024),
        "n_inner": ("d_ff", None),
        **SIZES,
    },
    choices={
        "activation_function": (
            "activation",
            "gelu_new",
            {
                "gelu_new": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh",
                "gelu": "gelu",
                "relu": "relu",
                "silu": "silu",
                "swish": "silu",
            },
        )
    },
    theirs={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    ours=COMMON | {"norm": "pre"},
    derived=_wider,
    aliases=ALIASES,
)


def _llama_map(
    names: Mapping[str, tuple[str, Any]],
    theirs: Mapping[str, Any],
    more: tuple[str, ...] = (),
    **ours: Any,
) -> LlamaMap:
    """Return the map of Llama or of a descendant.

    `names` are the keys that it has besides those of all, or with other defaults.
    """
    return LlamaMap(
        gpt.GPTConfig,
        names={
            "hidden_size": ("d_model", 4096),
            "num_hidden_layers": ("num_layers", 32),
            "num_attention_heads": ("num_heads", 32),
            HEADS_SHARED: ("num_kv_heads", 0),
            "head_dim": ("head_dim", 0),
            "rms_norm_eps": ("norm_epsilon", 1e-6),
            "rope_theta": ("rotary_base", 10000.0),
            "attention_dropout": ("attention_dropout_rate", 0.0),
            "tie_word_embeddings": ("tie_embeddings", False),
            **names,
        },
        choices={
            "hidden_act": (
                "activation",
                "silu",
                {
                    "silu": "silu",
                    "gelu": "gelu",
                    "gelu_new": "gelu_tanh",
                    "gelu_pytorch_tanh": "gelu_tanh",
                    "relu": "relu",
                },
            )
        },
        theirs=theirs,
        ours=SHARED
        | {
            "norm": "pre",
            "norm_type": "rms_norm",
            "positions": "rotary",
            "feed_forward": "gated",
            **ours,
        },
        derived=lambda fields: {"value_dim": fields["head_dim"]},
        more=("rope_scaling", "rope_parameters", "layer_types", *more),
        free=("rotary_scaling",),
    )


LLAMA = _llama_map(
    {
        "vocab_size": ("vocab_size", 32000),
        "intermediate_size": ("d_ff", 11008),
        "max_position_embeddings": ("max_length", 2048),
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("feed_forward_bias", False),
    },
    theirs={},
)
MISTRAL = _llama_map(
    {
        "vocab_size": ("vocab_size", 32000),
        "intermediate_size": ("d_ff", 14336),
        "max_position_embeddings": ("max_length", 131072),
        HEADS_SHARED: ("num_kv_heads", 8),
        WINDOW: ("attention_window", 4096),
    },
    theirs={},
    attention_bias=False,
    feed_forward_bias=False,
)
QWEN = {
    "vocab_size": ("vocab_size", 151936),
    "intermediate_size": ("d_ff", 22016),
    "max_position_embeddings": ("max_length", 32768),
    HEADS_SHARED: ("num_kv_heads", 32),
}
# without its use, a window has no effect
NO_WINDOW = {"use_sliding_window": False}
OF_WINDOWS = (WINDOW, "max_window_layers")
QWEN2 = _llama_map(
    QWEN,
    theirs=NO_WINDOW,
    more=OF_WINDOWS,
    attention_bias=True,
    attention_output_bias=False,
    feed_forward_bias=False,
)
QWEN3 = _llama_map(
    {
        **QWEN,
        "head_dim": ("head_dim", 128),
        "attention_bias": ("attention_bias", False),
    },
    theirs=NO_WINDOW,
    more=OF_WINDOWS,
    qk_norm=True,
    feed_forward_bias=False,
)


def with_conv1d(
    model: gpt.GPTConfig,
    outputs: Outputs,
    *,
    ours: str = "",
    tokens: str = "wte",
    places: str = "wpe",
) -> list[Entry]:
    """Return the entries of GPT or GPT-2, whose linear maps are (in, out).

    Our names start with `ours`.
    """
    layer = f"{ours}decoder/layers"
    theirs = "transformer.h.{}"
    projections = [
        linear(
            f"{layer}/self_attention/{name}",
            f"{theirs}.attn.c_attn",
            Layout(1, part=(i, 3)),
        )
        for i, name in enumerate(HEADS)
    ]
    return [
        Entry(
            f"{ours}embedding/table",
            f"transformer.{tokens}.weight",
            rows=model.vocab_size,
        ),
        Entry(f"{ours}positions/table", f"transformer.{places}.weight"),
        *(entry for projection in projections for entry in projection),
        *linear(f"{layer}/self_attention/output", f"{theirs}.attn.c_proj", Layout(2)),
        *norm(f"{layer}/self_attention_residual/layer_norm", f"{theirs}.ln_1"),
        *linear(f"{layer}/feed_forward/inner", f"{theirs}.mlp.c_fc", Layout(1)),
        *linear(f"{layer}/feed_forward/outer", f"{theirs}.mlp.c_proj", Layout(1)),
        *norm(f"{layer}/feed_forward_residual/layer_norm", f"{theirs}.ln_2"),
        *(
            norm(f"{ours}decoder/final_norm", "transformer.ln_f")
            if model.norm == "pre"
            else ()
        ),
        *_output(model, ours),
    ]


def llama(model: gpt.GPTConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of Llama and of its descendants.

    Their rotary positions turn the first half of a head's features with the second.
    """
    layer = "decoder/layers"
    theirs = "model.layers.{}"
    turned = Layout(1, transposed=True, halves=True)
    norms = {"query": "q_norm", "key": "k_norm"} if model.qk_norm else {}
    maps = {
        f"{layer}/self_attention/query": (
            f"{theirs}.self_attn.q_proj",
            turned,
            model.attention_bias,
        ),
        f"{layer}/self_attention/key": (
            f"{theirs}.self_attn.k_proj",
            turned,
            model.attention_bias,
        ),
        f"{layer}/self_attention/value": (
            f"{theirs}.self_attn.v_proj",
            LINEAR,
            model.attention_bias,
        ),
        f"{layer}/self_attention/output": (
            f"{theirs}.self_attn.o_proj",
            JOINING,
            model.attention_bias and model.attention_output_bias,
        ),
        f"{layer}/feed_forward/gate": (
            f"{theirs}.mlp.gate_proj",
            LINEAR,
            model.feed_forward_bias,
        ),
        f"{layer}/feed_forward/inner": (
            f"{theirs}.mlp.up_proj",
            LINEAR,
            model.feed_forward_bias,
        ),
        f"{layer}/feed_forward/outer": (
            f"{theirs}.mlp.down_proj",
            LINEAR,
            model.feed_forward_bias,
        ),
    }
    return [
        Entry("embedding/table", "model.embed_tokens.weight", rows=model.vocab_size),
        *(
            entry
            for name, (their, layout, bias) in maps.items()
            for entry in linear(name, their, layout)[: 1 + bias]
        ),
        *(
            Entry(
                f"{layer}/self_attention/{name}_norm/scale",
                f"{theirs}.self_attn.{their}.weight",
                dataclasses.replace(turned, inputs=0),
            )
            for name, their in norms.items()
        ),
        Entry(
            f"{layer}/self_attention_residual/rms_norm/scale",
            f"{theirs}.input_layernorm.weight",
        ),
        Entry(
            f"{layer}/feed_forward_residual/rms_norm/scale",
            f"{theirs}.post_attention_layernorm.weight",
        ),
        Entry("decoder/final_norm/scale", "model.norm.weight"),
        *_output(model),
    ]


def classifier(model: gpt.GPTConfig, outputs: Outputs) -> list[Entry]:
    """Return the entries of GPT-2 with a linear map from the vector of the last
    token, which has no bias.
    """
    return [
        *with_conv1d(model, outputs, ours="gpt/"),
        Entry("head/kernel", "score.weight", LINEAR),
    ]


@dataclasses.dataclass(frozen=True)
class OnPlainText(Head):
    """A head of another kind, for texts without special tokens around them."""

    kind: Head

    def read(self, config: Json) -> Outputs | None:
        outputs = self.kind.read(config)
        return outputs and outputs._replace(
            settings={**outputs.settings, "fine_tuning.plain_text": True}
        )

    def write(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        return self.kind.write(settings) if settings["fine_tuning.plain_text"] else None


class Continuation(Head):
    """The output layer of a language model. Its settings are the rules of
    `generate`.
    """

    def read(self, config: Json) -> Outputs:
        return Outputs(
            settings={
                f"decoding.{key}": value
                for key, value in generation.rules(config).items()
            }
        )

    def generation(
        self, settings: Mapping[str, Any], special_ids: Mapping[str, int | None]
    ) -> dict[str, Any]:
        ours = {key.removeprefix("decoding."): value for key, value in settings.items()}
        keys = generation.keys_of(ours, special_ids.get("eos_id"))
        return _special_ids(special_ids) | keys if keys else {}


def _special_ids(ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return keys of config.json."""
    return {f"{name.removesuffix('_id')}_token_id": i for name, i in ids.items()}


def _padded(ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return keys of config.json for a classifier, which finds the last token of a text
    by the padding after it.

    A vocabulary without padding is padded with its end.
    """
    return _special_ids(
        {**ids, "pad_id": ids["eos_id"]} if ids and ids["pad_id"] is None else ids
    )


def _output(model: gpt.GPTConfig, ours: str = "") -> list[Entry]:
    """Return the entry of the output layer, if it is not the embedding."""
    return (
        []
        if model.tie_embeddings
        else [Entry(f"{ours}output/table", "lm_head.weight", rows=model.vocab_size)]
    )


def _language_model(model: gpt.GPTConfig, outputs: int) -> nn.Module:
    return gpt.GPT(model)


def _classifier(model: gpt.GPTConfig, outputs: int) -> nn.Module:
    return gpt.GPTClassifier(model, outputs, specials=False)


_openai_names: Any = functools.partial(
    with_conv1d, tokens="tokens_embed", places="positions_embed"
)
_architecture: Any = functools.partial(
    Architecture,
    task="language_modeling",
    module=_language_model,
    ends="decoding.end_ids",
    begins="decoding.prepend_begin",
    special_ids=_special_ids,
    head=Continuation(),
    generates=generation.RULES | {"max_length", "max_new_tokens"},
)
_openai: Any = functools.partial(
    _architecture,
    model_type="openai-gpt",
    config=OPENAI,
    table=_openai_names,
    prefix="transformer.",
    ties={"lm_head.weight": "transformer.tokens_embed.weight"},
    # masks of older versions, and the tied output layer
    unused=r".*\.attn\.bias|.*position_ids|lm_head\.weight",
)
_gpt2: Any = functools.partial(
    _architecture,
    model_type="gpt2",
    config=GPT2,
    table=with_conv1d,
    prefix="transformer.",
    ties={"lm_head.weight": "transformer.wte.weight"},
    unused=r".*\.attn\.(masked_)?bias|lm_head\.weight",
)
_llama: Any = functools.partial(
    _architecture,
    table=llama,
    prefix="model.",
    ties={"lm_head.weight": "model.embed_tokens.weight"},
    unused=r".*rotary_emb\.inv_freq|lm_head\.weight",
)
_classifying: Any = functools.partial(
    _gpt2,
    "GPT2ForSequenceClassification",
    module=_classifier,
    table=classifier,
    lacks=("gpt/output",),
    ends="",
    begins="",
    special_ids=_padded,
    generates=(),
)

ARCHITECTURES = (
    _openai("OpenAIGPTLMHeadModel"),
    _openai("OpenAIGPTModel", bare=True),
    _gpt2("GPT2LMHeadModel"),
    _gpt2("GPT2Model", bare=True),
    _classifying(task="classification", head=OnPlainText(Classes())),
    _classifying(task="regression", head=OnPlainText(Value())),
    _llama("LlamaForCausalLM", model_type="llama", config=LLAMA),
    _llama("MistralForCausalLM", model_type="mistral", config=MISTRAL),
    _llama("Qwen2ForCausalLM", model_type="qwen2", config=QWEN2),
    _llama("Qwen3ForCausalLM", model_type="qwen3", config=QWEN3),
)
