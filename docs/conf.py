"""Settings of the site, which `scripts/docs.sh` builds with Sphinx."""

import inspect
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

import inventories  # noqa: E402  in the folder of the line above

project = "transformer_jax"
author = "the transformer_jax authors"
copyright = author
html_title = project

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.githubpages",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "house",
    "notebooks",
]
# https://HOST/OWNER/NAME of the repository, which CI knows. Without it, links to source
# code lead to copies of the files on the site.
repository = os.environ.get("DOCS_REPOSITORY", "")
extensions.append("sphinx.ext.linkcode" if repository else "sphinx.ext.viewcode")

exclude_patterns = ["_build", "_extensions", "_inventories"]

# Markdown, as GitHub shows it
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 6
myst_update_mathjax = False
suppress_warnings = [
    "myst.header",  # a page may start with a heading of level 2
    "ref.python",  # two classes have the same name, e.g. Task, in an annotation
]

# Pages of the book run when they are built. An error or a failed assert stops the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds for one cell
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # they would come from the network
nb_merge_streams = True
# Pages that take more than a minute run with `scripts/docs.sh --all` only.
LONG_PAGES: list[str] = []
nb_execution_excludepatterns = [] if os.environ.get("DOCS_ALL") else LONG_PAGES

# The reference: a page for each folder of the package, with its public names.
autosummary_generate = False
add_module_names = False
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"exclude-members": "setup, parent, name, scope"}
smartquotes = False  # "none" is a value in code
napoleon_use_ivar = True
napoleon_use_rtype = False
nitpicky = True
nitpick_ignore_regex = [
    (r"py:\w+", r"(?!transformer_jax\.).*"),  # others' names
    ("py:class", r".*<locals>.*|transformer_jax\.data\.batching\.Item"),  # not public
]

# Other projects' names lead to their documentation.
intersphinx_mapping = inventories.write(HERE / "_inventories", HERE / "_build" / "inventories")

# Nothing comes from the network. Sphinx loads this script on pages with equations, and
# math.js passes them to it.
mathjax_path = "katex/katex.min.js"
mathjax_options = {"loading_method": "defer"}
html_js_files = [("math.js", {"defer": "defer"})]

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["katex/katex.min.css", "site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "path_to_docs": "docs",
    "show_navbar_depth": 1,
    "show_toc_level": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
if repository:
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": "main",
        "use_repository_button": True,
        "use_source_button": True,
    }
copybutton_exclude = ".linenos, .gp, .go"


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of the lines that define a name."""
    value: object = sys.modules.get(info["module"])
    for part in info["fullname"].split("."):
        value = inspect.getattr_static(value, part, None)
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(value))  # type: ignore
        path = Path(inspect.getsourcefile(value) or "").relative_to(HERE.parent)  # type: ignore
    except (OSError, TypeError, ValueError):
        return None  # a field, or from another package
    return f"{repository}/blob/main/{path}#L{first}-L{first + len(lines) - 1}"
