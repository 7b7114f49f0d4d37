"""Declarations of config fields: their defaults, and what they say to the tools."""

import dataclasses

from transformer_jax import fields


@dataclasses.dataclass(frozen=True)
class Section:
    width: int = fields.size(512, 16)
    length: int = fields.size(256, 32, like="width", free=True)
    blocks: int = fields.how(4, 1, 2)
    vocabulary: str = fields.path("", makes_tokenizer=True)
    directory: str = fields.path("here")
    vectors: str = fields.beginning("")


METADATA = {field.name: field.metadata for field in dataclasses.fields(Section)}


def test_a_declared_field_has_its_default():
    assert Section() == Section(512, 256, 4, "", "here", "")


def test_only_sizes_that_are_declared_free_may_change():
    assert METADATA["length"]["free"]
    assert "free" not in METADATA["width"]
    assert METADATA["length"]["like"] == "width"


def test_the_other_ways_of_computing_are_listed_without_the_default():
    assert METADATA["blocks"]["how"] == (1, 2)


def test_a_path_makes_a_tokenizer_only_if_that_is_said():
    assert METADATA["vocabulary"]["makes_tokenizer"]
    assert METADATA["directory"] == {"free": True, "path": True}


def test_a_file_of_the_beginning_is_a_path_that_may_not_change():
    assert METADATA["vectors"] == {"path": True}
