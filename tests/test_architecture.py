"""The rules of the house: imports go down only, nothing is too long, every key is read."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_jax
from transformer_jax.config import ENGINE
from transformer_jax.tasks import TASKS, task_class

PACKAGE = Path(transformer_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# room → rooms of ours that it may import; its own is always allowed
MAY_IMPORT = {
    "models": set(),
    "data": set(),
    "losses": set(),
    "metrics": set(),
    "decoding": set(),
    "training": {"data"},
    "tasks": {"training.task", "models", "data", "decoding", "losses", "metrics"},
    "config": {"tasks", "training"},
    "report": {"metrics", "training.logging"},
    "predictor": {"config", "report", "training"},
    "verification": {"config", "tasks", "training"},
    "command_line": {"config", "training"},
    "__init__": {"predictor"},
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names below transformer_jax that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_jax"):
            module = node.module.removeprefix("transformer_jax").removeprefix(".")
            names |= {module} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("transformer_jax.")
                for alias in node.names
                if alias.name.startswith("transformer_jax")
            }
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    own = room(path)
    for name in imported(path):
        allowed = MAY_IMPORT[own] | {own}
        assert any(name == a or name.startswith(a + ".") for a in allowed), f"{path.name} must not import {name}"


def test_data_knows_no_jax():
    for path in (PACKAGE / "data").glob("*.py"):
        assert not re.search(r"^\s*(import|from) (jax|flax|optax)\b", path.read_text(), re.MULTILINE), path.name


def test_models_need_jax_and_flax_only():
    code = (
        "import sys; import transformer_jax.models, transformer_jax.models.attention; "
        "print([m for m in ('optax', 'orbax', 'ml_collections', 'tokenizers', 'sacrebleu', 'tensorflow_datasets',"
        " 'transformer_jax.training', 'transformer_jax.data') if m in sys.modules])"
    )
    # flax itself imports optax and orbax; what matters is that ours does not go further than flax does
    bare = subprocess.run(
        [sys.executable, "-c", code.replace("transformer_jax.models, transformer_jax.models.attention", "flax.linen")],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ours.stdout == bare.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_too_long(path):
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{path.name}: {node.name}"


def test_training_knows_no_task():
    for path in (PACKAGE / "training").glob("*.py"):
        assert not re.search(r"if .*\btask\b\s*==", path.read_text()), path.name


@pytest.mark.parametrize("task", TASKS)
def test_every_key_is_read(task):
    """No knob that nobody reads: each field is taken as an attribute somewhere, and not to be checked alone."""
    read = set()

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("problems"):
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        for child in ast.iter_child_nodes(node):
            look(child)

    for path in FILES:
        look(ast.parse(path.read_text()))
    cls = task_class(task)
    for section in (*ENGINE.values(), *cls.sections.values(), *cls.models.values()):
        fields = {field.name for field in dataclasses.fields(section)}
        if section is ENGINE["mesh"]:
            continue  # read as a whole, by dataclasses.asdict
        assert not fields - read, f"{section.__name__}: nobody reads {sorted(fields - read)}"
