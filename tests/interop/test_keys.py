"""Keys of config.json: none with an effect is dropped in silence."""

import json

import pytest

from helpers import marian_folders
from helpers.bert_folders import PRETRAINING, drawn
from helpers.bert_folders import save as save_bert
from helpers.gpt_folders import GPT2, LLAMA, gpt2_shapes, llama_shapes, save
from transformer_jax.interop import gpt, huggingface
from transformer_jax.interop.tensors import InteropError

# What transformers 4 writes into every config.json.
OLD = {
    "architectures": ["GPT2LMHeadModel"],
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "torchscript": False,
    "torch_dtype": "float32",
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "pruned_heads": {},
    "tie_word_embeddings": True,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "output_scores": False,
    "return_dict_in_generate": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "finetuning_task": None,
    "tokenizer_class": None,
    "prefix": None,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "problem_type": None,
    "_name_or_path": "gpt2",
    "n_ctx": 37,
    "summary_type": "cls_index",
    "transformers_version": "4.40.0",
}


def marian(folder, generation, **changes):
    marian_folders.save(
        folder,
        marian_folders.SHARED,
        decoder_start_token_id=30,
        pad_token_id=30,
        **changes,
    )
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return huggingface.read(folder)


def test_the_keys_of_old_versions_are_harmless(tmp_path, caplog):
    save(tmp_path, GPT2 | OLD, gpt2_shapes())
    huggingface.read(tmp_path)
    assert not caplog.records


def test_unknown_keys_are_named_if_they_have_a_value(tmp_path, caplog):
    save_bert(tmp_path, drawn(PRETRAINING), rope_style="new", other=None, third=False)
    huggingface.read(tmp_path)
    assert (
        "config.json has keys that are unknown here, and have no effect: "
        "rope_style = 'new';" in caplog.text
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pruned_heads": {"0": [1]}},
            (
                r"pruned_heads = \{'0': \[1\]\} is not supported: it changes what the"
                r" model comp"
            ),
        ),
        ({"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0 is not supported",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5 is not supported, only 1",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5 is not supported",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            (
                "quantization_config = gptq, 4 bits: "
                "the model is quantized: its tensors hold codes instead of values"
            ),
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "bitsandbytes",
                    "load_in_8bit": True,
                }
            },
            r"bitsandbytes, 8 bits: the model is quantized.*model.dequantize\(\)",
        ),
    ],
)
def test_keys_that_change_what_a_model_computes_are_refused(changes, message, tmp_path):
    save(tmp_path, LLAMA | changes, llama_shapes())
    with pytest.raises(InteropError, match=message):
        huggingface.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eos_token_id": "</s>"},
            "eos_token_id = '</s>' must be an id or a list of ids: copy the file again",
        ),
        (
            {"no_repeat_ngram_size": "3"},
            "no_repeat_ngram_size = '3' must be of type int",
        ),
        (
            {"repetition_penalty": True},
            "repetition_penalty = True must be of type float",
        ),
        (
            {"bad_words_ids": [3]},
            r"bad_words_ids = \[3\] must be a list of lists of ids",
        ),
        ({"renormalize_logits": 1}, "renormalize_logits = 1 must be of type bool"),
    ],
)
def test_values_of_another_type_are_refused(changes, message, tmp_path):
    with pytest.raises(
        InteropError, match=f"generation_config.json or config.json: {message}"
    ):
        marian(tmp_path, changes)


def test_other_names_of_sizes_are_read():
    """transformers takes hidden_size for n_embd, and so on."""
    names = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_hidden_layers": 5,
        "max_position_embeddings": 7,
    }
    model = gpt.GPT2.read(names)
    assert [
        model[key] for key in ("d_model", "num_heads", "num_layers", "max_length")
    ] == [24, 3, 5, 7]
    with pytest.raises(
        InteropError,
        match="hidden_size = 24 and n_embd = 48 mean the same and differ: remove one",
    ):
        gpt.GPT2.read({"hidden_size": 24, "n_embd": 48})


def test_marian_kinds_that_transformers_does_not_compute_are_refused(tmp_path):
    with pytest.raises(
        InteropError, match="normalize_before = True is not supported, only False"
    ):
        marian(tmp_path, {}, normalize_before=True)
