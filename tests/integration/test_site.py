"""Tests of docs/_extensions, the code of the site that `scripts/docs.sh` builds."""

import importlib.util
from types import ModuleType

from helpers import ROOT
from transformer_jax.models import attention
from transformer_jax.training import metric


def load(name: str) -> ModuleType:
    path = ROOT / "docs" / "_extensions" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def convert(text: str, module: ModuleType, documented: object = None) -> str:
    lines = load("docstrings").convert(text.split("\n"), module.__name__, documented)
    return "\n".join(lines).strip()


def test_code_is_a_link_where_it_is_a_public_name():
    text = convert("See `attend` and `mask`, or `attend`s.", attention)
    link = ":py:obj:`attend <transformer_jax.models.attention.attend>`"
    assert text == f"See {link} and ``mask``, or {link}\\ s."


def test_markup_of_restructuredtext_is_escaped():
    assert convert("*.py, |x| and W_ are text", attention) == (
        r"\*.py, \|x\| and W\_ are text"
    )


def test_a_list_of_fields_becomes_parameters():
    text = "A score.\n\nlabel: its name in\n    the log.\nbetter: the direction."
    assert convert(text, metric, metric.Metric) == (
        "A score.\n\n:param label: its name in\n    the log.\n"
        ":param better: the direction."
    )


def test_tables_numbered_lists_and_examples():
    table = convert("| a | b |\n|---|---|\n| 1 | 2 |", attention)
    rows = "   * - a\n     - b\n   * - 1\n     - 2"
    assert table == f".. list-table::\n   :header-rows: 1\n\n{rows}"
    steps = convert("Steps:\n1. one\n   more\n2. two", attention)
    assert steps == "Steps:\n\n1. one\n   more\n2. two"
    example = convert("In a folder:\n\n    a `b`", attention)
    assert example == "In a folder:\n\n.. code-block:: text\n\n    a `b`"


def test_dead_links_and_requests_to_the_network_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#here">b</a><a href="b.html#gone">b</a>'
        '<a href="c.html">c</a><a href="https://example.org">elsewhere</a>'
        '<script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p><a href="a.html#top">a</a>')
    assert load("check_site").problems(tmp_path) == [
        "a.html links to b.html#gone, which has no such anchor",
        "a.html links to c.html, which does not exist",
        "a.html loads https://example.org/x.js from the network",
    ]


def test_every_page_is_in_the_navigation():
    docs = ROOT / "docs"
    pages = {
        str(path.relative_to(docs).with_suffix(""))
        for path in docs.rglob("*.md")
        if "_build" not in path.parts
    }
    index = (docs / "index.md").read_text() + (docs / "book" / "index.md").read_text()
    lines = {line.strip() for line in index.splitlines()}
    named = lines | {f"book/{line}" for line in lines}
    assert pages - {"index"} <= named
