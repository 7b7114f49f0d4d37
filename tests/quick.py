"""The tests of `scripts/test.sh --quick`: mathematics, data, decoding, and a tiny
training of each task.
"""

from fnmatch import fnmatch
from pathlib import Path

import pytest

# Patterns of test files, and of single tests, below this folder.
CHOSEN = (
    "models/test_*.py",
    "models/kernels/test_b*.py",
    "models/kernels/test_products.py",
    "test_losses.py",
    "test_metrics.py",
    "test_spans.py",
    "data/test_*.py",
    "test_decoding.py",
    "test_generation.py",
    "test_rules.py",
    "test_sampling.py",
)
# Chosen by the patterns, but not run: tests of downloads, of exported programs, and of
# other packages.
LEFT_OUT = (
    "data/test_download.py",
    "data/test_tokenizers_of_transformers.py",
    "models/test_export.py",
    "models/test_nnx.py",
)
# The recipe that trains each task in test_configs.py.
TRAINED = {
    "sequence_to_sequence": "ted_hrlr-",
    "language_modeling": "gpt-lstm",
    "bert_pretraining": "bert-mini",
    "classification": "finetune-task=sick",
    "regression": "finetune-task=stsb",
    "multiple_choice": "finetune-task=swag",
    "question_answering": "finetune-task=squad2",
    "tagging": "finetune-task=wnut17",
}
TRAININGS = "test_configs.py"
FOLDER = Path(__file__).parent


def is_chosen(file: str) -> bool:
    """Return True for a file, relative to this folder, whose tests are all run."""
    return any(fnmatch(file, pattern) for pattern in CHOSEN) and file not in LEFT_OUT


def left_out() -> list[str]:
    """Return the files of which no test is run."""
    files = (str(path.relative_to(FOLDER)) for path in FOLDER.rglob("test_*.py"))
    return sorted(file for file in files if not is_chosen(file) and file != TRAININGS)


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
    names = {f"test_recipe_runs[{recipe}]" for recipe in TRAINED.values()}
    others = [i for i in items if i.path.name == TRAININGS and i.name not in names]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


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
