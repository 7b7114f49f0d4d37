"""Keys of config.json and generation_config.json: none with an effect is dropped in
silence.
"""

import json

import pytest

from helpers import marian_folders
from helpers.bert_folders import PRETRAINING, drawn
from helpers.bert_folders import save as save_bert
from helpers.gpt_folders import GPT2, LLAMA, gpt2_shapes, llama_shapes, save
from transformer_jax.interop import gpt, huggingface
from transformer_jax.interop.tensors import InteropError

GENERATION = {
    "renormalize_logits": True,
    "no_repeat_ngram_size": 1,
    "min_length": 4,
    "min_new_tokens": 7,
    "repetition_penalty": 1.3,
    "forced_bos_token_id": 0,
    "eos_token_id": [0, 5],
    "bad_words_ids": [[30], [7], [0]],
    "suppress_tokens": [8, 9],
}
OURS = {
    "renormalize": True,
    "no_repeat_ngram": 1,
    "min_tokens": 8,
    "repetition_penalty": 1.3,
    "first_id": 0,
    "end_ids": (0, 5),
    "forbidden_ids": (7, 8, 9),
}
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


def rules(settings):
    return {
        key.removeprefix("decoding."): value
        for key, value in settings.items()
        if key[9:] in OURS
    }


def test_rules_of_marian_are_read_and_written(tmp_path):
    found = marian(tmp_path / "theirs", GENERATION)
    assert rules(found.outputs.settings) == OURS
    huggingface.write(
        tmp_path / "again",
        "sequence_to_sequence",
        found.model,
        found.params(),
        found.outputs.settings,
        special_ids=marian_folders.IDS,
    )
    assert rules(huggingface.read(tmp_path / "again").outputs.settings) == OURS


@pytest.mark.parametrize(
    ("config", "shapes"), [(GPT2, gpt2_shapes()), (LLAMA, llama_shapes())]
)
def test_rules_of_language_models_are_read_and_written(config, shapes, tmp_path):
    save(tmp_path / "theirs", config, shapes)
    given = {
        "eos_token_id": [3, 5],
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.1,
        "min_new_tokens": 2,
    }
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(given))
    found = huggingface.read(tmp_path / "theirs")
    ours = {
        "end_ids": (3, 5),
        "no_repeat_ngram": 3,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
    }
    assert found.outputs.settings == {
        f"decoding.{key}": value for key, value in ours.items()
    }
    ids = {"pad_id": None, "bos_id": 3, "eos_id": 3}
    huggingface.write(
        tmp_path / "again",
        "language_modeling",
        found.model,
        found.params(),
        found.outputs.settings,
        special_ids=ids,
    )
    assert (
        huggingface.read(tmp_path / "again").outputs.settings == found.outputs.settings
    )


def test_generation_config_replaces_what_config_says_of_generate(tmp_path):
    """As in transformers, where the keys of an older config.json count only if there
    is no other file.
    """
    with_both = marian(
        tmp_path / "both", {"num_beams": 2}, num_beams=6, no_repeat_ngram_size=3
    )
    assert with_both.outputs.settings["decoding.beam_size"] == 2
    assert not rules(with_both.outputs.settings)
    (tmp_path / "both" / "generation_config.json").unlink()
    alone = huggingface.read(tmp_path / "both").outputs.settings
    assert (alone["decoding.beam_size"], alone["decoding.no_repeat_ngram"]) == (6, 3)


def test_max_new_tokens_comes_before_max_length(tmp_path):
    found = marian(tmp_path, {"max_new_tokens": 7, "max_length": 512})
    assert found.outputs.settings["decoding.max_extra"] == 7


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"do_sample": True, "top_p": 0.9}, ["do_sample = True", "top_p = 0.9"]),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            ["diversity_penalty = 0.5", "num_beam_grou"],
        ),
        ({"encoder_no_repeat_ngram_size": 3}, ["encoder_no_repeat_ngram_size = 3"]),
        ({"bad_words_ids": [[3, 4]]}, ["bad_words_ids of several tokens"]),
        (
            {"exponential_decay_length_penalty": [5, 1.1]},
            ["exponential_decay_length_penalty = [5, 1.1]"],
        ),
        ({"begin_suppress_tokens": [4]}, ["begin_suppress_tokens = [4]"]),
    ],
)
def test_what_is_not_taken_over_is_named(generation, named, tmp_path, caplog):
    marian(tmp_path, generation)
    (record,) = caplog.records
    assert "these settings of `generate` are not taken over" in record.message
    assert all(name in record.message for name in named)


@pytest.mark.parametrize(
    "generation",
    [{"top_p": 0.9, "temperature": 0.6}, {"length_penalty": 2.0}, {"num_beams": 3}],
)
def test_settings_without_an_effect_are_not_named(generation, tmp_path, caplog):
    marian(tmp_path, generation)
    assert not caplog.records


def test_a_language_model_names_beams(tmp_path, caplog):
    save(tmp_path, GPT2 | {"num_beams": 5, "min_length": 3}, gpt2_shapes())
    huggingface.read(tmp_path)
    assert "not taken over: min_length = 3, num_beams = 5;" in caplog.text


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
