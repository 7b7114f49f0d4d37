"""The tests of `scripts/test.sh --quick`: mathematics, data, decoding, and a tiny
training of each task.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

# Patterns of test files below tests/.
CHOSEN = (
    "models/test_*.py",
    "models/kernels/test_*.py",
    "integration/test_parameters.py",
    "test_losses.py",
    "test_metrics.py",
    "test_spans.py",
    "data/test_*.py",
    "data/corpora/test_digits.py",
    "decoding/test_*.py",
)
# Chosen by the patterns, but not run: tests of other packages, and of kernels for
# accelerators.
LEFT_OUT = (
    "data/test_tokenizer_files_transformers.py",
    "models/kernels/test_accelerators.py",
    "models/kernels/test_checks.py",
    "models/kernels/test_short.py",
)
# The most expensive tests of the chosen files, which are not run: tests on eight
# devices, of derivatives of derivatives, of initial values, of draws, and of variants
# that must give the same.
LEFT_OUT_TESTS = (
    "data/test_batching.py::test_the_search_for_buckets_is_bounded_where_lengths_are_not",
    "data/test_sources.py::test_processes_may_prepare_dates_at_once_and_say_nothing",
    "data/test_tokenizer_training.py::test_a_script_without_a_main_guard_trains_and_encodes_alone",
    "decoding/test_generation.py::test_draws_depend_on_the_seed_the_row_and_its_text_alone",
    "decoding/test_search.py::test_search_takes_the_options",
    "models/kernels/test_bits.py::test_hashed_bits_do_not_depend_on_the_mesh",
    "models/kernels/test_chunks.py::test_chunks_on_eight_devices",
    "models/test_bert.py::test_everything_starts_small",
    "models/test_checks.py::test_a_mesh_with_explicit_axes_is_refused_with_the_call_that_works",
    "models/test_checks.py::test_layers_work_without_compilation",
    "models/test_checks.py::test_masks_of_zeros_and_ones_equal_boolean_masks",
    "models/test_gpt.py::test_everything_starts_small",
    "models/test_gpt.py::test_other_ways_to_the_same",
    "models/test_stack.py::test_a_residual_stream_in_bfloat16",
    "models/test_stack.py::test_each_call_draws_its_own_dropout",
    "models/test_stack.py::test_layers_without_a_loop_are_those_of_a_loop",
    "models/test_stack.py::test_pieces_with_a_cache_give_the_causal_whole",
    "models/test_stack.py::test_the_last_map_of_a_sublayer_starts_smaller_in_a_deep_stack",
    "models/test_transformer.py::test_every_layer_and_sublayer_drops_other_units",
    "models/test_transformer.py::test_layers_start_different_and_as_one_layer_does",
    "models/test_transformer.py::test_modes_of_differentiation_agree",
    "models/test_transformer.py::test_other_ways_to_the_same",
    "models/test_transformer.py::test_rows_that_share_a_source_read_it_once",
)
# Of these tests, the first and the last case are run. Each case compiles programs of
# its own, and other tests compare the same variants, or their parts, with their
# equations.
TWO_CASES = (
    "models/kernels/test_blocked.py::test_equals_the_reference",
    "models/kernels/test_chunks.py::test_chunks_give_the_value_and_the_gradient_of_the_plain_form",
    "models/kernels/test_chunks.py::test_each_device_takes_chunks_of_its_rows",
    "models/kernels/test_products.py::test_bfloat16_products_rounds_operands_and_cotangents_and_nothing_else",
    "models/kernels/test_products.py::test_products_and_their_gradients_have_the_types_that_are_asked_for",
    "models/kernels/test_products.py::test_tangents_and_second_derivatives",
    "models/test_attention.py::test_a_prompt_and_then_single_steps_give_what_the_whole_gives",
    "models/test_attention.py::test_grouped_queries_are_heads_with_copied_keys_and_values",
    "models/test_bert.py::test_classifiers_of_tokens_and_of_features",
    "models/test_bert.py::test_dropout_acts_when_given_a_key",
    "models/test_bert.py::test_what_sees_what",
    "models/test_checks.py::test_wrong_ids_are_refused",
    "models/test_checks.py::test_wrong_validity_is_refused",
    "models/test_convs2s.py::test_forward_flops",
    "models/test_convs2s.py::test_gradients",
    "models/test_convs2s.py::test_the_model_is_its_equations",
    "models/test_gpt.py::test_a_cache_gives_the_logits_of_the_whole",
    "models/test_gpt.py::test_documents_packed_in_rows_are_like_separate_ones",
    "models/test_gpt.py::test_rows_of_a_cache_may_begin_at_different_places",
    "models/test_positions.py::test_a_prompt_and_then_pieces_give_what_the_whole_gives",
    "models/test_positions.py::test_hypotheses_of_a_beam_have_the_logits_of_their_own_tokens",
    "models/test_recurrent.py::test_beams_share_their_source",
    "models/test_recurrent.py::test_bfloat16",
    "models/test_recurrent.py::test_forward_flops",
    "models/test_recurrent.py::test_gradients",
    "models/test_recurrent.py::test_model_is_its_equations",
    "models/test_transformer.py::test_dropout_acts_when_given_a_key_wherever_it_has_a_rate",
    "models/test_transformer.py::test_the_model_is_the_equations",
)
# The recipe that trains each task in integration/test_configs.py.
TRAINED = {
    "sequence_to_sequence": "ted_hrlr-",
    "several_decoders": "languages-pivot,decoders=each",
    "transcription": "speech-model=ctc",
    "language_modeling": "gpt-lstm",
    "bert_pretraining": "bert-mini",
    "electra_pretraining": "electra-mini",
    "denoising": "denoising-objective=text_infilling",
    "classification": "finetune-task=sick",
    "regression": "finetune-task=stsb",
    "multiple_choice": "finetune-task=swag",
    "question_answering": "finetune-task=squad2",
    "tagging": "finetune-task=wnut17",
}
TRAININGS = "integration/test_configs.py"
FOLDER = Path(__file__).parents[1]


def is_chosen(file: str) -> bool:
    """Return True for a file, relative to tests/, whose tests are all run."""
    return any(fnmatch(file, pattern) for pattern in CHOSEN) and file not in LEFT_OUT


def left_out() -> list[str]:
    """Return the files of which no test is run."""
    files = (str(path.relative_to(FOLDER)) for path in FOLDER.rglob("test_*.py"))
    return sorted(file for file in files if not is_chosen(file) and file != TRAININGS)


def name_of(item: pytest.Item) -> str:
    """Return the file, relative to tests/, and the name without the case."""
    return f"{item.path.relative_to(FOLDER)}::{item.name.partition('[')[0]}"


def cases_to_run(test: str, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """Return the cases of `test` that are run."""
    if test.startswith(TRAININGS):
        names = {f"test_recipe_runs[{recipe}]" for recipe in TRAINED.values()}
        return [case for case in cases if case.name in names]
    if test in LEFT_OUT_TESTS:
        return []
    return [cases[0], cases[-1]] if test in TWO_CASES else cases


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="run mathematics, data, decoding and a tiny training of each task",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out whole files, which need not be imported then."""
    if not config.getoption("quick") or FOLDER not in collection_path.parents:
        return None
    file = str(collection_path.relative_to(FOLDER))
    return True if file in left_out() else None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if not config.getoption("quick"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(name_of(item), []).append(item)
    chosen = {case for test in cases for case in cases_to_run(test, cases[test])}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("quick"):
        terminalreporter.section("left out by --quick")
        terminalreporter.write_line(" ".join(left_out()))
        terminalreporter.write_line(
            f"and of {TRAININGS} all but one training of each task: "
            + " ".join(TRAINED.values())
        )
        terminalreporter.write_line("and " + " ".join(LEFT_OUT_TESTS))
        terminalreporter.write_line(
            "and all but two cases of each of " + " ".join(TWO_CASES)
        )
