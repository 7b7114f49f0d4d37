"""The chapters of the book as Jupyter notebooks, which a reader may download."""

import re
import textwrap
from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx
from sphinx.directives.code import LiteralIncludeReader

HEADER = "---\njupytext:"
INCLUDE = re.compile(r"```\{literalinclude\} (?P<path>\S+)\n(?P<options>(?::.*\n)*)```")
OPTION = re.compile(r":(?P<name>[\w-]+): \"?(?P<value>.*?)\"?\n")
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!https?:)[^)]+\)")
FOLDED = re.compile(r"</?details>\n?")
PLACEHOLDER = "https://github.com/OWNER/transformer_jax"


def add_link(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add a link to the notebook below the title of a chapter."""
    if source[0].startswith(HEADER):
        name = f"{Path(docname).name}.ipynb"
        link = f'<a href="{name}" download>Download this chapter as a notebook</a>'
        text = re.sub(r"^# .*$", rf"\g<0>\n\n{link}", source[0], count=1, flags=re.M)
        source[0] = with_address(app, text)


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write a notebook beside the page of each chapter."""
    if exception or app.builder.format != "html":
        return
    for page in sorted((Path(app.srcdir) / "book").glob("*.md")):
        text = page.read_text()
        if text.startswith(HEADER):
            notebook = read_myst_markdown_notebook(alone(app, page, text))
            nbformat.write(notebook, Path(app.outdir) / "book" / f"{page.stem}.ipynb")


def alone(app: Sphinx, page: Path, text: str) -> str:
    """Return a page that needs no other file: with the code that it includes, with
    answers unfolded, and without links to other pages.
    """

    def included(directive: re.Match[str]) -> str:
        options = dict(OPTION.findall(directive["options"]))
        path = (page.parent / directive["path"]).resolve()
        code, _ = LiteralIncludeReader(str(path), options, app.config).read()
        return f"```python\n{textwrap.dedent(code).strip()}\n```"

    text = INCLUDE.sub(included, text)
    text = FOLDED.sub("", text).replace("<summary>Answer</summary>", "*Answer*")
    return with_address(app, LINK.sub(r"\g<text>", text))


def with_address(app: Sphinx, text: str) -> str:
    """Return a text in which the address of the repository is right, if it is known."""
    return text.replace(PLACEHOLDER, app.config.repository or PLACEHOLDER)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions above."""
    app.connect("source-read", add_link)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
