"""Architecture rules: imports go down only, nothing is too long, general code knows
no model, every key is read.
"""

import ast
import collections
import dataclasses
import functools
import re
import subprocess
import sys
import tokenize
import typing
from pathlib import Path

import pytest

import transformer_jax
from helpers import ROOT
from transformer_jax import claims, records
from transformer_jax.config import _alternatives, sections
from transformer_jax.data.splits import SplitData
from transformer_jax.decoding.options import SamplingConfig
from transformer_jax.tasks import TASKS, config_class, find
from transformer_jax.training.task import EvaluationConfig, Task, TrainingConfig

PACKAGE = Path(transformer_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# room (module or folder of the package, or of one of its folders) → rooms that it may
# import, besides itself and those of `EVERYWHERE`
EVERYWHERE = ("console", "errors", "fields", "files", "shipped")
MAY_IMPORT = {
    "__main__": set(),
    "console": set(),
    "errors": set(),
    "fields": set(),
    "files": set(),
    "shipped": set(),
    "models": set(),
    "models.kernels": {"models.masks", "models.checks"},
    "models.kernels.placement": set(),
    "models.masks": {"models.checks"},
    "models.checks": {"models.kernels.placement"},
    "data": set(),
    # the plan: all of the data that the engine knows
    "data.batching": {"data.columns", "data.ragged"},
    "data.columns": set(),
    "data.ragged": set(),
    "data.progress": set(),
    "losses": {"models.kernels", "models.layers"},
    "metrics": set(),
    "spans": {"metrics"},
    "text_scores": {"metrics"},
    "minimal_pairs": {"data"},
    "decoding": {"models.caches"},
    "training": {"data.batching", "data.progress"},
    "training.flops": {"models.counting"},
    "compilation": {"data.batching", "training"},
    "tasks": {
        "training.task",
        "training.metric",
        "models",
        "data",
        "decoding",
        "losses",
        "metrics",
        "spans",
        "text_scores",
    },
    "interop": {"models", "data"},
    # mathematics of counts, which knows nothing of folders
    "baselines.ngrams": {"data.ragged"},
    "baselines.kneser_ney": {"baselines.ngrams", "data.ragged"},
    "baselines.arpa": {"baselines.kneser_ney"},
    "baselines": {"data", "metrics", "config", "workdir"},
    "config": {"tasks", "training"},
    "workdir": {"config", "tasks", "training.task"},
    "transfer": {"config", "workdir", "training", "data", "interop"},
    "experiment": {"config", "workdir", "transfer", "training"},
    "rounding": {"models.layers", "models.kernels"},
    "predictor": {"config", "workdir", "rounding", "training"},
    "naming": {"models.layers"},
    "inside": {"naming", "predictor", "data.batching", "training"},
    "report": {"inside", "training"},
    # ablations have tasks of their own
    "claims": {
        "config",
        "transfer",
        "experiment",
        "predictor",
        "minimal_pairs",
        "models",
        "losses",
        "data",
        "tasks",
        "training",
    },
    "records": {
        "claims",
        "config",
        "experiment",
        "predictor",
        "data.progress",
        "training",
    },
    "sweep": {"claims", "config", "experiment", "tasks", "training"},
    "conversion": {
        "config",
        "workdir",
        "transfer",
        "predictor",
        "interop",
        "data",
        "training",
    },
    "exporting": {"predictor", "data", "training"},
    "exported": set(),
    "verification": {"config", "exporting", "training"},
    "command_line": {"config", "workdir", "tasks", "data", "training"},
    "__init__": {"inside", "predictor", "training.task"},
}


def module_name(path: Path) -> str:
    """Return the dotted name below transformer_jax of a file."""
    return str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".")


def room(path: Path) -> str:
    """Return the smallest room that a file is in."""
    parts = module_name(path).split(".")
    names = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((name for name in names if name in MAY_IMPORT), parts[0])


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the dotted names below transformer_jax that a file imports, anywhere in
    it.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "transformer_jax"
        ):
            module = node.module.removeprefix("transformer_jax").removeprefix(".")
            prefix = f"{module}." if module else ""
            names |= {module} - {""} | {prefix + alias.name for alias in node.names}
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
        allowed = MAY_IMPORT[own] | {own, *EVERYWHERE}
        assert any(name == a or name.startswith(a + ".") for a in allowed), (
            f"{path.name} must not import {name}"
        )


def test_modules_do_not_import_one_another_in_a_circle():
    """`MAY_IMPORT` excludes cycles between rooms.

    This test excludes cycles between the modules of a room.
    """
    modules = {module_name(path): path for path in FILES}
    below = {
        name: {i for i in imported(path) if i in modules and i != name}
        for name, path in modules.items()
    }
    while leaves := {name for name, others in below.items() if not others}:
        below = {
            name: others - leaves
            for name, others in below.items()
            if name not in leaves
        }
    assert not below


# What only kernels/ may know: devices, compilers and meshes, and how a search keeps its
# caches.
HOW = {"platform", "gpu", "tpu", "cpu", "xla", "barrier", "beam", "mesh"}
MODELS = [
    path
    for path in FILES
    if room(path).split(".")[0] == "models"
    and not room(path).startswith("models.kernels")
]


def knows_how(source: str) -> set[str]:
    """Return the words of HOW that are parts of identifiers or strings of code.

    Docstrings and comments do not count. A part may be in the plural.
    """
    tree = ast.parse(source)
    texts = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # of statements, which may be strings: docstrings
            node.body = [
                statement
                for statement in body
                if not isinstance(statement, ast.Expr)
                or not isinstance(statement.value, ast.Constant)
            ]
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            texts += [text for text in values if isinstance(text, str)]
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", " ".join(texts))
    words = {part.lower() for part in parts}
    return (words | {word.removesuffix("s") for word in words}) & HOW


@pytest.mark.parametrize("path", MODELS, ids=module_name)
def test_models_name_no_device_outside_of_kernels(path):
    assert not knows_how(path.read_text())


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("if platforms.is_cpu(): pass", "cpu"),
        ("from transformer_jax.models.kernels import platforms", "platform"),
        ("from transformer_jax.models.kernels.platforms import current", "platform"),
        ("x = jax.lax.optimization_barrier(x)", "barrier"),
        ("ON = {'tpu': 1}", "tpu"),
        ("GPUS = 1", "gpu"),
        ("raise ValueError(f'{x}: XLA does not support it')", "xla"),
        ("class BeamCache: pass", "beam"),
        ("def f(beams=1): pass", "beam"),
        ("f(beam_size=1)", "beam"),
        ("x = jax.sharding.get_abstract_mesh()", "mesh"),
    ],
)
def test_a_device_in_a_model_is_noticed(line, word):
    assert word in knows_how(line)


def test_outputs_and_docstrings_name_no_device():
    assert not knows_how(
        '"""On a TPU."""\ndef f():\n    """On CPUs."""\n    output = 1'
    )


def test_data_knows_no_jax():
    for path in (PACKAGE / "data").rglob("*.py"):
        assert not re.search(
            r"^\s*(import|from) (jax|flax|optax)\b", path.read_text(), re.MULTILINE
        ), path.name


def test_models_need_jax_and_flax_only():
    code = (
        "import sys; import transformer_jax.models, transformer_jax.models.attention; "
        "print([m for m in ('optax', 'orbax', "
        "'ml_collections', 'tokenizers', 'sacrebleu', 'tensorflow_datasets', "
        "'transformer_jax.training', 'transformer_jax.data') if m in sys.modules])"
    )
    # flax itself imports optax and orbax. The models must not import more of these
    # packages than flax does.
    bare = subprocess.run(
        [
            sys.executable,
            "-c",
            code.replace(
                "transformer_jax.models, transformer_jax.models.attention", "flax.linen"
            ),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ours.stdout == bare.stdout


def tokens_by_line(path: Path) -> list[int]:
    """Return the line of each name, number and operator of a file."""
    kinds = {tokenize.NAME, tokenize.NUMBER, tokenize.OP}
    with path.open("rb") as file:
        return [
            token.start[0]
            for token in tokenize.tokenize(file.readline)
            if token.type in kinds
        ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_too_long(path):
    lines = tokens_by_line(path)
    assert len(lines) <= 3500
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            length = sum(
                node.lineno <= line <= (node.end_lineno or 0) for line in lines
            )
            assert length <= 600, f"{path.name}: {node.name} has {length} tokens"


# Pages that are read beside a paper.
PAGES = (
    "losses",
    "models.alignment",
    "models.attention",
    "models.bert",
    "models.caches",
    "models.convs2s",
    "models.decoders",
    "models.electra",
    "models.encoder_decoder",
    "models.front_ends",
    "models.gpt",
    "models.layers",
    "models.masks",
    "models.positions",
    "models.recurrent",
    "models.recurrent_encoders",
    "models.recurrent_lm",
    "models.stack",
    "models.t5",
    "models.transformer",
    "models.kernels.bits",
    "models.kernels.blocked",
    "models.kernels.chunks",
    "models.kernels.loop",
    "decoding.beam",
    "decoding.loop",
)


def code_lines(path: Path) -> set[int]:
    """Return the lines of a file with code. Docstrings and comments are none."""
    no_code = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in no_code:
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def test_pages_beside_a_paper_are_not_dense():
    """Their lines of code have at most 7.5 names, numbers and operators on average, and
    those of the densest page 9.
    """
    tokens = []
    lines = []
    for name in PAGES:
        path = PACKAGE / (name.replace(".", "/") + ".py")
        tokens.append(len(tokens_by_line(path)))
        lines.append(len(code_lines(path)))
        assert tokens[-1] / lines[-1] <= 9, name
    assert sum(tokens) / sum(lines) <= 7.5


TESTS = ROOT / "tests"
TEST_FILES = sorted(TESTS.rglob("test_*.py"))
MODULES = sorted(path for path in FILES if path.name != "__init__.py")
# tests/integration/test_claims.py runs all of them
CLAIMS = {PACKAGE / "claims" / f"{name.replace('-', '_')}.py" for name in claims.NAMES}
# tests/integration/test_records.py runs all of them
RECORDS = {
    PACKAGE / "records" / f"{records.file_of(name)}.py" for name in records.NAMES
}
# Modules without a test file of their name → the file that tests them, and a function
# or class that it calls: one of the module, or of a module that imports it.
TESTED_IN = {
    "__main__.py": ("test_shipped.py", "main"),
    # plumbing: every run, error and task goes through it
    "errors.py": ("test_command_line.py", "UserError"),
    "experiment.py": ("test_transfer.py", "run"),
    "tasks/sequence_to_sequence_config.py": (
        "tasks/test_sequence_to_sequence_captions.py",
        "score",
    ),
    "tasks/teacher_forcing.py": ("tasks/test_sequence_to_sequence.py", "loss"),
    "tasks/pairs.py": ("tasks/test_sequence_to_sequence.py", "batches"),
    "tasks/labelled_texts.py": ("tasks/test_classification.py", "batches"),
    # parts of what is tested as a whole, against its equations or with real processes
    "data/workers.py": ("training/test_signals.py", "workers"),
    "models/decoders.py": ("models/test_recurrent.py", "RecurrentSeq2Seq"),
    "models/kernels/difference.py": (
        "models/kernels/test_checks.py",
        "compare_kernels",
    ),
}


@pytest.mark.parametrize(
    "path", TEST_FILES, ids=lambda path: str(path.relative_to(TESTS))
)
def test_test_modules_do_not_import_one_another(path):
    assert not re.search(r"^\s*(import|from) test_", path.read_text(), re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Return the names of all functions and classes of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in nodes if isinstance(node, kinds)}


def called(path: Path) -> set[str]:
    """Return the names of what a file calls, also in the programs that it runs."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            names.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"\b(\w+)\(", node.value))
    return names


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if path not in CLAIMS | RECORDS],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_every_module_has_a_test_file_of_its_name_or_is_listed(path):
    module = path.relative_to(PACKAGE)
    file = TESTS / module.with_name(f"test_{module.name}")
    listed = TESTED_IN.get(str(module))
    assert file.exists() != bool(listed)
    if listed:
        elsewhere, function = listed
        users = [user for user in FILES if module_name(path) in imported(user)]
        assert function in set().union(*map(defined, [path, *users]))
        assert function in called(TESTS / elsewhere)


def test_what_is_listed_without_a_test_file_is_a_module():
    assert {*TESTED_IN} <= {str(path.relative_to(PACKAGE)) for path in MODULES}


@pytest.mark.parametrize(
    "path", TEST_FILES, ids=lambda path: str(path.relative_to(TESTS))
)
def test_a_test_file_is_of_a_module_or_an_integration_test(path):
    """Its name is test_MODULE.py or test_MODULE_TOPIC.py, in the folder of the
    module.
    """
    file = path.relative_to(TESTS)
    words = file.stem.split("_")[1:]
    names = ["_".join(words[: i + 1]) for i in range(len(words))]
    modules = [PACKAGE / file.with_name(f"{name}.py") for name in names]
    assert (
        file.parts[0] == "integration"
        or path == Path(__file__)
        or any(module in MODULES for module in modules)
    )


def models_of(task: str) -> list[type]:
    return list(_alternatives(typing.get_type_hints(config_class(task))["model"]))


def names(section: type) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}


# Keys that generic code may use: those of every model, every data set and the engine.
GENERAL = (
    {"architecture", "d_model", "dtype"}
    | names(SplitData)
    | names(TrainingConfig)
    | names(EvaluationConfig)
)
SPECIAL = set(TASKS)
for _task in TASKS:
    _engine = {
        section
        for section in sections(_task, {}).values()
        if section.__module__.split(".")[1] == "training"
    }
    for _section in {*models_of(_task), *sections(_task, {}).values()} - _engine:
        SPECIAL |= names(_section)
    SPECIAL |= {_model.architecture for _model in models_of(_task)}
# Names with a second meaning: `engine.init`, `optax.tree.norm`, "attention" as a
# method, `Batches.references`, axes of arrays, and `Config.frozen`.
SPECIAL -= GENERAL | {"init", "norm", "attention", "references", "head_dim", "seed"}
SPECIAL -= {"frozen"}
# sharding.py is left out: its error messages name the keys that set the sizes of axes.
GENERIC_MODULES = (
    "config",
    "workdir",
    "transfer",
    "conversion",
    "experiment",
    "predictor",
    "naming",
    "inside",
    "exporting",
    "verification",
    "sweep",
)
GENERIC_CODE = [
    *(
        path
        for path in (PACKAGE / "training").glob("*.py")
        if path.name != "sharding.py"
    ),
    *(PACKAGE / "compilation").glob("*.py"),
    *(PACKAGE / f"{name}.py" for name in GENERIC_MODULES),
    *(PACKAGE / "report").glob("*.py"),
    *(ROOT / "scripts").glob("*.py"),
]


def knowledge(source: str) -> set[str]:
    """Return the names of tasks, architectures and special keys that occur as
    attributes or strings.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {
                node.value,
                node.value.removeprefix("model.")
                .removeprefix("data.")
                .removeprefix("decoding."),
            }
    return found & SPECIAL


@pytest.mark.parametrize("path", GENERIC_CODE, ids=lambda path: path.name)
def test_general_code_knows_no_task_and_no_model(path):
    assert not knowledge(path.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "if config.task == 'language_modeling': pass",
        "config.decoding.n_best = 1",
        "rate = config.training.label_smoothing",
        "tokenizer = config.evaluation.bleu_tokenizer",
        "variants = {'model.unroll': 2}",
        "if config.model.architecture == 'recurrent': pass",
        "width = self.config.model.num_heads",
    ],
)
def test_knowledge_is_noticed(line):
    assert knowledge(line)


# The names under which code holds a section or a whole config.
OWNERS = {
    "model",
    "data",
    "masking",
    "fine_tuning",
    "optimizer",
    "training",
    "lora",
    "decoding",
    "answers",
    "evaluation",
}
OWNERS |= {"checkpoint", "config", "_config", "c", "options"}
# The section → a class whose fields have the values of those with the same names.
COPIED = {SamplingConfig: "Rules"}
# checking a key does not count as reading it
CHECKS = ("problems", "choices", "advice", "check")


def reads(source: str) -> dict[str, set[str]]:
    """Return the fields that code reads from a config, under "", and those that each
    class reads from itself, under its name.

    Functions that only check fields do not count.
    """
    found = collections.defaultdict(set)

    def look(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.FunctionDef) and node.name in CHECKS:
            return
        if isinstance(node, ast.ClassDef):
            inside = node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = getattr(node.value, "attr", getattr(node.value, "id", None))
            if owner in OWNERS:
                found[""].add(node.attr)
            elif owner == "self" and inside:
                found[inside].add(node.attr)
        for child in ast.iter_child_nodes(node):
            look(child, inside)

    look(ast.parse(source), "")
    return found


@functools.cache
def reads_of_file(path: Path) -> dict[str, set[str]]:
    return reads(path.read_text())


def read_by(found: dict[str, set[str]], classes: set[str]) -> set[str]:
    """Return the fields read if `self` is the config in `classes`."""
    return set().union(*(found.get(name, set()) for name in {"", *classes}))


def test_self_is_a_config_in_its_own_class_only():
    source = """
class Ours:
    def read(self): return self.a
class Other:
    def read(self): return self.b, self.config.c
"""
    assert read_by(reads(source), {"Ours"}) == {"a", "c"}


def readers(section: type) -> list[Path]:
    """Return the files that may read a section.

    Only models read their own keys; other code reads the rest. The folders of the
    classes that a section extends may read their keys too.
    """
    if section.__module__.split(".")[1] == "models":
        return [path for path in FILES if room(path) == "models"]
    extended = {room_of(cls) for cls in section.__mro__} - {""}
    rooms = extended | {"data", "tasks", "training", "predictor"}
    return [path for path in FILES if room(path) in rooms]


def unread(section: type) -> set[str]:
    classes = {cls.__name__ for cls in section.__mro__}
    classes |= {copy for cls, copy in COPIED.items() if issubclass(section, cls)}
    files = readers(section)
    read = set().union(*(read_by(reads_of_file(path), classes) for path in files))
    return names(section) - read - {"architecture"}  # config.py reads `architecture`


def test_no_task_is_derived_from_another():
    tasks = {find(name).task for name in TASKS}
    ours = [cls for cls in Task.__subclasses__() if room_of(cls) == "tasks"]
    assert tasks == {*ours}
    # but for ablations
    derived = [cls for task in ours for cls in task.__subclasses__()]
    assert {room_of(cls) for cls in derived} <= {"", "claims"}


def room_of(cls: type) -> str:
    """Return the folder of the package that a class is in, or ""."""
    package, *inside = cls.__module__.split(".")
    return inside[0] if package == PACKAGE.name else ""


@pytest.mark.parametrize("task", TASKS)
def test_every_key_is_read(task):
    for section in (*models_of(task), *sections(task, {}).values()):
        if section.__name__ != "MeshConfig":  # read as a whole, by dataclasses.asdict
            assert not unread(section), section.__name__


@pytest.mark.parametrize("name", ["never_read", "norm_epsilons", "label_smoothings"])
@pytest.mark.parametrize("task", TASKS)
def test_a_key_that_nobody_reads_is_noticed(task, name):
    for section in (
        *models_of(task),
        sections(task, {})["data"],
        sections(task, {})["optimizer"],
    ):
        more = dataclasses.make_dataclass(
            "More", [(name, int, 0)], bases=(section,), frozen=True
        )
        more.__module__ = section.__module__
        assert unread(more) == {name}
