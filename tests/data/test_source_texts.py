"""The texts of sources that scores compare with."""

from transformer_jax.data.source_texts import source_text
from transformer_jax.data.text import ParallelData


def test_the_text_of_a_source_is_the_record():
    assert source_text("<2de> He go  home .", ParallelData()) == "<2de> He go  home ."
    assert source_text("", ParallelData()) == ""


def test_the_token_of_a_language_is_no_part_of_it():
    data = ParallelData(directions=("en-de", "de-en"))
    assert source_text("<2de> He go <2en> home .", data) == "He go <2en> home ."
    assert source_text("", data) == ""


def test_the_prefix_of_a_task_is_no_part_of_it():
    data = ParallelData(prefixes=("correct: ", "correct: it: "))
    assert source_text("correct: it: He go home .", data) == "He go home ."
    assert source_text("correct: He correct: go", data) == "He correct: go"
    assert source_text("", data) == ""
