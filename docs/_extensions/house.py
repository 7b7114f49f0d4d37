"""What the site needs beyond Sphinx: the reference, links out of docs/, llms.txt."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docstrings import convert
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "transformer_jax"
LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]+)?\)")
# Flax adds these fields to the constructor of every module.
FLAX_FIELDS = re.compile(r"(, )?parent: .*, name: str \| None = None(?=\))")

logger = logging.getLogger(__name__)


def module_name(path: Path) -> str:
    """Return the dotted name of a file or a folder of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def write_reference(app: Sphinx) -> None:
    """Write a page for each folder of the package: all modules and public names."""
    for init in PACKAGE.rglob("__init__.py"):
        room = module_name(init)
        modules = [module_name(path) for path in sorted(init.parent.glob("*.py")) if path != init]
        page = [*heading(room, "="), f".. automodule:: {room}"]
        page += ["   :members:", "   :ignore-module-all:", ""]
        page += [".. autosummary::", ""]
        page += ["   " + name.removeprefix(f"{room}.") for name in modules]
        page.append("")
        for name in modules:
            page += [*heading(name, "-"), f".. automodule:: {name}"]
            page += ["   :members:", "   :special-members: __call__", ""]
        text = "\n".join(page)
        path = Path(app.srcdir) / "api" / f"{room}.rst"
        if not path.exists() or path.read_text() != text:  # else it is built again
            path.write_text(text)


def heading(module: str, underline: str) -> list[str]:
    """Return a heading with a label, which `resolve_links` refers to."""
    title = module.removeprefix("transformer_jax.")
    return [f".. _reference-{module}:", "", title, underline * len(title), ""]


def resolve_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links to files above docs/, which GitHub resolves, lead somewhere here too.

    A module's page of the reference stands for its file. The host of the repository
    shows another file, if there is a host; else the file is downloaded.
    """
    page = Path(app.env.doc2path(docname))

    def replaced(link: re.Match[str]) -> str:
        path = (page.parent / link["path"]).resolve()
        anchor = link["anchor"] or ""
        if path.is_relative_to(app.srcdir) or not path.exists():
            return link[0]
        if path.is_relative_to(PACKAGE):
            return f"](#reference-{module_name(path)})"
        if path.name == "CONTRIBUTING.md":
            return f"](/contributing.md{anchor})"
        if path.name == "README.md":
            return "](/index.md)"
        if app.config.repository:
            kind = "tree" if path.is_dir() else "blob"
            name = path.relative_to(ROOT)
            return f"]({app.config.repository}/{kind}/main/{name}{anchor})"
        return link[0]

    source[0] = LINK.sub(replaced, source[0])


def shorten_signature(
    app: Sphinx,
    kind: str,
    name: str,
    documented: Any,
    options: Any,
    arguments: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Drop the two fields that Flax adds to the constructor of every module."""
    if kind == "class" and arguments:
        arguments = FLAX_FIELDS.sub("", arguments)
    return arguments, returned


def convert_docstring(
    app: Sphinx, kind: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Convert a docstring in place, before napoleon reads it."""
    if kind == "module":
        module = name
    else:
        module = getattr(documented, "__module__", None) or ""
    if module.startswith("transformer_jax"):
        lines[:] = convert(lines, module, documented)


def skip_aliases(
    app: Sphinx, kind: str, name: str, documented: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of named tuples, which the text of the class describes."""
    text = getattr(documented, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") else None


def resolve_bare_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.reference | None:
    """Let the bare name of an error, e.g. in `Raises:`, lead to its only definition."""
    if node.get("reftype") != "exc":
        return None
    domain = env.domains.python_domain
    known = [name for name in domain.objects if name.endswith(f".{node['reftarget']}")]
    if len(known) != 1:
        return None
    found = domain.objects[known[0]]
    return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content)


def public_names(path: Path) -> list[str]:
    """Return the public functions and classes that a module defines."""
    return [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]


def methods_without_docstring(path: Path) -> Iterator[str]:
    """Yield the public methods without a docstring, as Class.method.

    A method may have that of a parent, or of a protocol in the same module. Members of a
    protocol with the body `...` are those of a class that its docstring names.
    """
    module = importlib.import_module(module_name(path))
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    protocols = [
        getattr(module, node.name) for node in classes if "Protocol" in map(ast.unparse, node.bases)
    ]
    for node in classes:
        owner = getattr(module, node.name)
        methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
        for name in methods:
            if node.name.startswith("_") or name.startswith("_") or name == "setup":
                continue
            owners = [owner, *protocols] if owner not in protocols else []
            described = any(inspect.getdoc(getattr(one, name)) for one in owners if hasattr(one, name))
            if owners and not described:
                yield f"{node.name}.{name}"


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names without a docstring, which the reference leaves out."""
    documented = env.domains.python_domain.objects
    for path in sorted(PACKAGE.rglob("*.py")):
        missing = [name for name in public_names(path) if f"{module_name(path)}.{name}" not in documented]
        for name in [*missing, *methods_without_docstring(path)]:
            logger.warning("%s.%s has no docstring", module_name(path), name)


def first_sentence(env: BuildEnvironment, docname: str) -> str:
    for paragraph in env.get_doctree(docname).findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if text:
            return re.split(r"(?<=[.?!:]) ", text)[0]
    return ""


def write_llms(app: Sphinx, exception: Exception | None) -> None:
    """Write llms.txt (llmstxt.org): each page with its first sentence, in order."""
    if exception or app.builder.format != "html":
        return
    env = app.env
    lines = [f"# {app.config.project}", "", f"> {first_sentence(env, 'index')}", ""]
    for docname in walk(env, "index"):
        title = env.titles[docname].astext()
        sentence = first_sentence(env, docname)
        lines.append(f"- [{title}]({docname}.html): {sentence}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join([*lines, ""]))


def walk(env: BuildEnvironment, docname: str) -> list[str]:
    """Return the pages below a page, in the order of the table of contents."""
    below = []
    for child in env.toctree_includes.get(docname, []):
        below += [child, *walk(env, child)]
    return below


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions above."""
    app.add_config_value("repository", "", "env")
    app.connect("builder-inited", write_reference)
    app.connect("source-read", resolve_links)
    app.connect("autodoc-process-docstring", convert_docstring, priority=400)
    app.connect("autodoc-skip-member", skip_aliases)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("missing-reference", resolve_bare_name)
    app.connect("env-updated", check_reference)
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
