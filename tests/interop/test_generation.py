"""Keys of generate: which options of decoding they become."""

import json

import pytest

from helpers import marian_folders
from helpers.gpt_folders import GPT2, LLAMA, gpt2_shapes, llama_shapes, save
from transformer_jax.interop import huggingface

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
