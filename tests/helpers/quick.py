"""The tests of `scripts/test.sh --quick`: mathematics, data, decoding, and a tiny
training of each task.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from helpers.slow import FOLDER, name_of

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


def is_chosen(file: str) -> bool:
    """Return True for a file, relative to tests/, whose tests are all run."""
    return any(fnmatch(file, pattern) for pattern in CHOSEN) and file not in LEFT_OUT


def left_out() -> list[str]:
    """Return the files of which no test is run."""
    files = (str(path.relative_to(FOLDER)) for path in FOLDER.rglob("test_*.py"))
    return sorted(file for file in files if not is_chosen(file) and file != TRAININGS)


def cases_to_run(test: str, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """Return the cases of `test` that are run."""
    if test.startswith(TRAININGS):
        names = {f"test_recipe_runs[{recipe}]" for recipe in TRAINED.values()}
        return [case for case in cases if case.name in names]
    return [] if test in LEFT_OUT_TESTS else cases


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
