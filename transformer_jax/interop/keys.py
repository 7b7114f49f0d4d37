"""Keys of config.json that no table reads: those without effect, and those that must
not be ignored.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from transformer_jax.interop.generation import NEUTRAL
from transformer_jax.interop.tensors import InteropError

Json = Mapping[str, Any]

# Keys that change what a model computes, and that no supported class has → the values
# with which they do not.
EFFECTIVE: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_multiplier": (1,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1,),
    "embedding_size": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "normalize_decoder_before": (False,),
    "normalize_encoder_before": (False,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rotary_pct": (1,),
    "sliding_window": (),
    "tie_encoder_decoder": (False,),
    "use_sliding_window": (False,),
}
# Keys without an effect on predictions: names, versions, training, and which outputs
# are returned.
HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_from_model_config",
        "_name_or_path",
        "_num_labels",
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classif_dropout",
        "classifier_dropout",
        "cls_token_id",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "directionality",
        "disable_compile",
        "do_lower_case",
        "dtype",
        "eos_token_id",
        "experts_implementation",
        "finetuning_task",
        "generation_config",
        "gradient_checkpointing",
        "id2label",
        "init_std",
        "initializer_factor",
        "initializer_range",
        "is_assistant",
        "is_decoder",
        "is_encoder_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "low_memory",
        "mask_token_id",
        "max_matching_ngram_size",
        "model_max_length",
        "model_type",
        "n_ctx",
        "n_special",
        "name_or_path",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_hidden_layers",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_past",
        "output_scores",
        "pad_token_id",
        "predict_special_tokens",
        "prefill_chunk_size",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "prompt_lookup_num_tokens",
        "reorder_and_upcast_attn",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "speculation_type",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
        "use_mtp",
        "vocab_size",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_cache_len",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ]
)


def refuse(config: Json, supported: Collection[str] = ()) -> None:
    """Raise InteropError for a key that changes what a model computes, and is not
    `supported`.
    """
    if config.get("quantization_config"):
        raise InteropError(
            "config.json: quantization_config = "
            f"{_method(config['quantization_config'])}: {QUANTIZED}"
        )
    for key, neutral in EFFECTIVE.items():
        value = config.get(key)
        if key not in supported and value is not None and value not in neutral:
            raise InteropError(
                f"config.json: {key} = {value!r:.80} is not supported: it "
                "changes what the model computes; name a folder of a model without it"
            )


QUANTIZED = (
    "the model is quantized: its tensors hold codes instead of values. "
    "Name the folder of the original model, or write the values with transformers: "
    "AutoModel….from_pretrained(DIR), model.dequantize(), model.save_pretrained(NEW); "
    "remove quantization_config from the new config.json if it is still there"
)


def _method(settings: Any) -> str:
    """Return the name of a quantization, and its bits if they are given."""
    if not isinstance(settings, Mapping):
        return repr(settings)
    method = settings.get("quant_method", "unknown")
    bits = settings.get("bits", settings.get("w_bit"))
    if settings.get("load_in_4bit"):
        bits = 4
    if settings.get("load_in_8bit"):
        bits = 8
    return f"{method}, {bits} bits" if bits else str(method)


def unknown(config: Json, supported: Collection[str]) -> Iterator[str]:
    """Yield "key = value" for each key that is not in `supported`, nor in the tables
    here, and has a value.
    """
    for key, value in config.items():
        listed = (
            key in supported or key in HARMLESS or key in EFFECTIVE or key in NEUTRAL
        )
        if not listed and value not in (None, False, 0, "", [], {}):
            yield f"{key} = {value!r:.80}"
