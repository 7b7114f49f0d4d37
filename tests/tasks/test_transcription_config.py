"""The rules between the sections of transcription."""

import pytest

from helpers.runs import get_config
from transformer_jax.config import ConfigError, parse


@pytest.mark.parametrize("model", ["attention", "ctc", "joint", "las"])
@pytest.mark.parametrize("data", ["strings", "words"])
def test_every_variant_of_the_recipe_is_valid(model, data):
    config = get_config("speech", f"model={model},data={data}")
    config.data.directory = "none"
    parsed = parse(config)
    assert parsed.columns.names == ("file", "text")
    assert parsed.longest[1] == parsed.input.max_positions
    smoothed = "loss" if model == "ctc" else "loss (with label smoothing)"
    assert parsed.training.loss_label == smoothed
    assert parsed.decoding.length_penalty == 0


@pytest.mark.parametrize(
    ("model", "key", "value", "rule"),
    [
        ("joint", "training.ctc_weight", 1.5, r"in \[0, 1\]"),
        ("joint", "decoding.ctc_weight", -0.1, r"in \[0, 1\]"),
        ("attention", "decoding.ctc_weight", 0.1, "which trains no CTC"),
        ("ctc", "decoding.ctc_weight", 0.5, "which trains no decoder"),
        ("ctc", "data.references", 2, "a recording has one text"),
        ("joint", "data.table", "all.tsv", "must be '': write a table for each split"),
        ("ctc", "training.label_smoothing", 0.1, r"must be 0\.0 .* no decoder"),
        ("joint", "decoding.renormalize", True, "must be False with"),
        # rules of the sections and of sequence_to_sequence
        ("ctc", "input.time_masks", -1, "at least 0"),
        ("las", "model.pyramid_layers", -1, "at least 0"),
        ("joint", "training.label_smoothing", 1.0, r"in \[0, 1\)"),
        ("joint", "training.steps", 0, "at least 1"),
        ("joint", "decoding.beam_size", 99, "must not exceed"),
        ("joint", "data.joint_tokenizer", True, "must be False"),
    ],
)
def test_what_does_not_fit_is_refused(model, key, value, rule):
    config = get_config("speech", f"model={model}")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=rf"config\.{key} = .*{rule}"):
        parse(config)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_one_part_alone_may_be_renormalized(weight):
    config = get_config("speech", "model=joint")
    config.decoding.renormalize = True
    config.decoding.ctc_weight = weight
    assert parse(config).decoding.renormalize
