"""Tests of every Markdown page: its code runs, its output is what the code prints, its
commands and links are right.

A ```python block is run, after the blocks above it, in a copy of the repository's
folders. If its first line is a comment with a path, e.g. `# my_package/score.py`, the
block is written to that file instead. A ```text block directly after a ```python block
is its expected output. A ```bash block is checked without being run: each line is a
comment or a command. It has no "…" and no [optional] parts. A line that ends in a
backslash continues on the next one.

A page that says "This page continues [title](page.md)" is run after that page. It has
its files, but not its names.
"""

import itertools
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import ROOT, bart_folders, bert_folders, gpt_folders
from helpers.bert_folders import PRETRAINING, drawn, save
from helpers.forked import script
from helpers.runs import get_config
from transformer_jax.workdir import store

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *ROOT.glob("README.md"),
        *ROOT.glob("CONTRIBUTING.md"),
        *ROOT.glob("CHANGELOG.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
)

# Replacements for pages that take long. Output is compared only above the first
# changed block. This includes the slow test, which runs these pages unchanged: the
# result of a long training depends on the processor.
SHORTENED: dict[str, list[tuple[str, str]]] = {
    # its model writes texts as the one above it does
    "docs/from_flax_transformers.md": [
        ('conversion.to_workdir(conversion.config_for("bart"), "runs/bart")', ""),
        ('"runs/bart", {"decoding.beam_size": 4, ', '"runs/gpt2", {'),
    ],
}
# tolerance of numbers with a decimal point, or one unit in the last digit printed
RELATIVE = 0.02
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d*)?(?:e[+-]?\d+)?"
MARK = "=== line {} ==="
# as in pyproject.toml
SETTINGS = "import jax, warnings; warnings.simplefilter('error')"


class Block(NamedTuple):
    line: int  # number of its first line of code
    language: str
    code: str
    after: str  # text between the previous block and this one

    @property
    def file(self) -> str | None:
        """Path in the first line, if the block is a file."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.code)
        return found and found[1]


def blocks(text: str) -> list[Block]:
    found, end = [], 0
    for fence in re.finditer(
        r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(line, fence[1], fence[2], text[end : fence.start()]))
        end = fence.end()
    return found


def outputs(page: list[Block]) -> dict[int, str]:
    """Return {line of a python block: the text block directly after it}."""
    pairs = itertools.pairwise(page)
    return {
        a.line: b.code
        for a, b in pairs
        if (a.language, b.language) == ("python", "text") and not b.after.strip()
    }


def continued(name: str) -> list[str]:
    """Return the pages that page `name` continues, the first one first."""
    found = re.search(
        r"This\s+page\s+continues\s+\[[^\]]*\]\((\w+\.md)", (ROOT / name).read_text()
    )
    if not found:
        return []
    before = str(Path(name).with_name(found[1]))
    return [*continued(before), before]


def folder(path: Path, name: str, page: list[Block]) -> None:
    """Create the folders and files that a page uses."""
    for copied in ("configs", "scripts"):
        shutil.copytree(ROOT / copied, path / copied)
    (path / "docs" / "images").mkdir(parents=True)
    save(path / "pretrained", drawn(PRETRAINING))
    bert_folders.save_classifier(path / "classifier")
    gpt_folders.save_gpt2(path / "gpt2")
    bart_folders.save("Bart", path / "bart")
    bart_folders.save_tokenizer("Bart", path / "bart")
    (path / "runs" / "electra").mkdir(parents=True)
    store(path / "runs" / "electra", get_config("electra", "mini"))
    earlier = [blocks((ROOT / before).read_text()) for before in continued(name)]
    for block in itertools.chain(*earlier, page):
        if block.language == "python" and block.file:
            assert not block.file.startswith("transformer_jax/"), (
                f"{block.file} would change the package"
            )
            (path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (path / block.file).write_text(block.code)


def program(page: list[Block], imports: Iterable[str] = ()) -> str:
    """Return the blocks as one program, in which every line has the same number as
    on the page. The first line imports the modules `imports`.
    """
    lines = ["; ".join([SETTINGS, *(f"import {name}" for name in imports)])]
    for block in page:
        if block.language == "python" and not block.file:
            lines += [""] * (block.line - 2 - len(lines))
            lines += [f"print({MARK.format(block.line)!r})", *block.code.splitlines()]
    return "\n".join([*lines, ""])


def run(name: str, text: str, path: Path) -> dict[int, str]:
    """Return {line of a block: its output}."""
    page = blocks(text)
    folder(path, name, page)
    earlier = {f"before_{i}": before for i, before in enumerate(continued(name))}
    for module, before in earlier.items():
        code = program(blocks((ROOT / before).read_text()))
        (path / f"{module}.py").write_text(code)
    (path / "page.py").write_text(program(page, earlier))
    done = script(str(path / "page"), cwd=path, timeout=1800)
    assert done.returncode == 0, (
        f"{name} fails; "
        f"line numbers of page.py are those of the page.\n{done.stderr.decode()}"
    )
    parts = re.split(MARK.format(r"(\d+)") + "\n", done.stdout.decode())
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))


def check_output(where: str, expected: str, printed: str) -> None:
    """Assert equal output.

    Words and whole numbers must be equal, other numbers equal within a tolerance.
    """
    pieces = re.split(rf"(…|\s+|{NUMBER})", expected.strip())
    patterns = [
        (
            ".*?"
            if x == "…"
            else (
                r"\s+"
                if x.isspace()
                else f"({NUMBER})"
                if re.fullmatch(NUMBER, x)
                else re.escape(x)
            )
        )
        for x in pieces
        if x
    ]
    found = re.fullmatch("".join(patterns), printed.strip(), re.DOTALL)
    assert found, f"{where} prints\n{printed}\nand the page says\n{expected}"
    numbers = [x for x in pieces if re.fullmatch(NUMBER, x)]
    for old, new in zip(numbers, found.groups(), strict=True):
        assert close(old, new), (
            f"{where} prints {new} where the page says {old}:\n{printed}"
        )


def close(old: str, new: str) -> bool:
    old, new = old.replace(",", ""), new.replace(",", "")
    if not re.search(r"[.e]", old):
        return old == new
    digits, _, exponent = old.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(float(old) - float(new)) <= max(RELATIVE * abs(float(old)), 1.001 * unit)


def check(name: str, path: Path, replacements: list[tuple[str, str]]) -> None:
    """Run a page with `replacements` and compare the output of the blocks above the
    first that SHORTENED changes.
    """
    text = (ROOT / name).read_text()
    page, compared = blocks(text), outputs(blocks(text))
    for old, _ in SHORTENED.get(name, []):
        changed = [
            block.line
            for block in page
            if block.language == "python" and old in block.code
        ]
        assert changed, f"{name} has no {old!r} to replace: see SHORTENED"
        compared = {
            line: expected for line, expected in compared.items() if line < changed[0]
        }
    for old, new in replacements:
        text = text.replace(old, new)
    printed = run(name, text, path)
    for line, expected in compared.items():
        if line in printed:
            check_output(f"{name}:{line}", expected, printed[line])


def has_code(name: str) -> bool:
    page = blocks((ROOT / name).read_text())
    return any(block.language == "python" for block in page)


@pytest.mark.parametrize("name", [name for name in PAGES if has_code(name)])
def test_code_runs_and_prints_what_the_page_says(name, tmp_path):
    check(name, tmp_path, SHORTENED.get(name, []))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTENED)
def test_long_pages_run_as_they_are(name, tmp_path):
    check(name, tmp_path, [])


# Run a script with `command_line.run` replaced, so that it only parses the flags and
# the config.
PARSE = """
import runpy, sys
from absl import flags
from transformer_jax import claims, command_line, config, records, tasks
from transformer_jax.baselines import counted

def run(main, argv=None, **options):
    overrides, others = command_line.split_overrides()
    command_line.parse_flags(others if argv is None else argv)
    if sys.argv[0].endswith("reproduce.py"):  # other words are names
        for name in set(sys.argv) - set(argv):
            if name.startswith("record:"):
                records.find(name.removeprefix("record:"))
            elif not name.startswith("--config"):
                claims.find(name)
    recipe = flags.FLAGS.config if "config" in flags.FLAGS else None
    if recipe is not None and recipe.task == counted.TASK:
        counted.NgramRun(recipe, "run")
    elif recipe is not None:
        random = sys.argv[0].endswith("benchmark.py") and flags.FLAGS.length
        if random or sys.argv[0].endswith(("describe.py", "verify.py")):
            # they need no data
            recipe.data.directory = recipe.data.directory or "(none)"
        config.parse(recipe)
    elif overrides:  # of a run: its config must be one of a task
        problems = []
        for task in tasks.TASKS:
            try:
                config.override(config.defaults(task), overrides)
                break
            except config.ConfigError as problem:
                problems.append(problem)
        else:
            raise problems[0]

def run_on_workdir(main, read=None):
    command_line.define_task()
    flags.DEFINE_string("workdir", None, "", required=True)
    run(main)

command_line.run, command_line.run_on_workdir = run, run_on_workdir
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def commands(name: str, block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield ("page:line", words) for every command of a bash block, without
    redirections.
    """
    line = block.line
    for text in re.split(r"(?<!\\)\n", block.code):
        where, line = f"{name}:{line}", line + text.count("\n") + 1
        assert not re.search(r"…|\.\.\.|(^|\s)\[", text), (
            f"{where}: a command has no … and no [optional] parts"
        )
        lexer = shlex.shlex(
            re.sub(r"\\\n|[<>]+ *\S+", "", text), posix=True, punctuation_chars="|&;"
        )
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;"):
                words.append(word)
            elif words:
                yield where, words
                words = []


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_right(name, tmp_path):
    page = blocks((ROOT / name).read_text())
    folder(tmp_path, name, page)
    (tmp_path / "parse.py").write_text(PARSE)
    for where, words in (
        found
        for block in page
        if block.language == "bash"
        for found in commands(name, block)
    ):
        for word in words:
            if re.match(r"(scripts|configs|tests|docs)/[\w/.-]+\.\w+$", word):
                assert (ROOT / word).exists() or (tmp_path / word).exists(), (
                    f"{where}: there is no {word}"
                )
        if found := [
            word for word in words if re.match(r"scripts/(\w+\.py|launch/\w+)", word)
        ]:
            arguments = words[words.index(found[0]) + 1 :]
            if "/launch/" in found[0]:  # launchers pass these options to train.py
                found[0], arguments = (
                    "scripts/train.py",
                    [word for word in arguments if word.startswith("--")],
                )
            done = script(str(tmp_path / "parse"), found[0], *arguments, cwd=tmp_path)
            assert done.returncode == 0, (
                f"{where}: {shlex.join(words)}\n{done.stderr.decode()}"
            )


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = base = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{base}-{number}"
        found.add(anchor)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    text = without_code((ROOT / name).read_text())
    links = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(
        r"(?:src|href)=\"([^\"]+)\"", text
    )
    links += re.findall(r"^\[[^\]]+\]: +(\S+)", text, re.MULTILINE)
    for link in links:
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = ROOT / name if not target else (ROOT / name).parent / target
        assert path.exists(), f"{name} links to {link}, which does not exist"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), (
                f"{name} links to {link}: the headings are {sorted(anchors(path))}"
            )


@pytest.mark.parametrize(
    "name", [name for name in PAGES if name.startswith("docs/results/")]
)
def test_results_are_short(name):
    lines = len((ROOT / name).read_text().splitlines())
    assert lines <= 150, (
        f"{name} has {lines} lines, limit 150: "
        "move what was tried on the way to docs/log.md, "
        "and what did not help to docs/results/negative.md"
    )


def test_readme_is_short():
    lines = len((ROOT / "README.md").read_text().splitlines())
    assert lines <= 150, (
        f"README.md has {lines} lines, limit 150: "
        "move what a first reader does not need to docs/"
    )
