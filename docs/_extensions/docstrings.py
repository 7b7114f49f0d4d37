"""The docstrings of the package, which are nearly Markdown, as reStructuredText.

They have Google's sections (`Args:`, `Raises:`), which napoleon reads, and beside them
lists of fields ("name: meaning"), numbered lists, tables and indented examples.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

FIELD = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>\S.*)")
ITEM = re.compile(r"(?:\d+\.|-) ")
CODE = re.compile(r"`([^`]+)`")


def convert(lines: list[str], module: str, documented: Any) -> list[str]:
    """Return the lines of a docstring in reStructuredText."""
    blocks = split(lines)
    result: list[str] = []
    for number, block in enumerate(blocks):
        if block[0].startswith("    ") and number:  # an indented example
            result += [".. code-block:: text", "", *block, ""]
        elif block[0].startswith("| "):
            result += [*table(block, module, documented), ""]
        else:
            result += [*paragraph(block, module, documented), ""]
    return result


def split(lines: list[str]) -> list[list[str]]:
    """Return the blocks that empty lines separate, with indented ones in one piece."""
    blocks: list[list[str]] = []
    open_block = False
    for line in lines:
        if not line.strip():
            open_block = False
            continue
        indented = line.startswith("    ")
        if open_block:
            blocks[-1].append(line)
        elif indented and blocks and blocks[-1][-1].startswith("    "):
            blocks[-1] += ["", line]
        else:
            blocks.append([line])
        open_block = True
    return blocks


def paragraph(block: list[str], module: str, documented: Any) -> list[str]:
    """Convert a paragraph, a list or a section."""
    known = arguments(documented)
    result: list[str] = []
    in_list = False
    for line in whole_code(block):
        field = FIELD.fullmatch(line)
        if field and all(name in known for name in field["names"].split(", ")):
            text = inline(field["text"], module, documented)
            result.append(f":param {field['names']}: {text}")
        elif field and (in_list or line is block[0]) and len(block) > 1:
            text = inline(field["text"], module, documented)
            result += ["", f"- ``{field['names']}``: {text}"]
            in_list = True
        elif ITEM.match(line):
            if not in_list:
                result.append("")
            result.append(inline(line, module, documented))
            in_list = True
        elif in_list and line.startswith(" "):
            result.append("  " + inline(line.strip(), module, documented))
        else:
            line = re.sub(r"^Differs: ", "**Differs:** ", line)
            is_in_field = any(row.startswith(":param ") for row in result)
            margin = "    " if is_in_field and line[0] != " " else ""
            result.append(margin + inline(line, module, documented))
    return reindent(result)


def whole_code(block: list[str]) -> Iterator[str]:
    """Yield the lines of a block, joined where code goes over the end of a line."""
    pending = ""
    for line in block:
        pending = f"{pending} {line.strip()}" if pending else line
        if pending.count("`") % 2 == 0:
            yield pending
            pending = ""
    if pending:
        yield pending


def reindent(lines: list[str]) -> list[str]:
    """Align the lines of a numbered item with its text."""
    result: list[str] = []
    width = 2
    for line in lines:
        item = re.match(r"(\d+\.|-) ", line)
        if item:
            width = len(item[0])
        elif line.startswith("  ") and not line.startswith("   "):
            line = " " * width + line.strip()
        result.append(line)
    return result


def table(block: list[str], module: str, documented: Any) -> list[str]:
    """Convert a table of Markdown."""
    result = [".. list-table::", "   :header-rows: 1", ""]
    for row in block[:1] + block[2:]:
        for number, cell in enumerate(row.strip().strip("|").split("|")):
            start = "   * - " if number == 0 else "     - "
            result.append(start + inline(cell.strip(), module, documented))
    return result


def inline(text: str, module: str, documented: Any) -> str:
    """Convert code, and escape what reStructuredText would read as markup."""
    return "".join(pieces(text, module, documented))


def pieces(text: str, module: str, documented: Any) -> Iterator[str]:
    parts = CODE.split(text)
    for number, part in enumerate(parts):
        if number % 2 == 0:
            part = re.sub(r"(?<!\*)\*(?!\*)|[|`]", r"\\\g<0>", part)
            yield re.sub(r"(?<=\w)_(?!\w)", r"\\_", part)
            continue
        # Markup has to be a word of its own; an escaped space does not show.
        if re.search(r"[^\s'\"(\[{<\-/:]$", parts[number - 1]):
            yield "\\ "
        address = target(part, module, documented)
        yield f":py:obj:`{part} <{address}>`" if address else f"``{part}``"
        if re.match(r"[^\s'\")\]}>\-/:.,;!?]", parts[number + 1]):
            yield "\\ "


def target(name: str, module: str, documented: Any) -> str | None:
    """Return the full name of a public function or class of the package."""
    if not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*", name):
        return None
    for start in (sys.modules.get(module), documented):
        value = start
        for part in name.split("."):
            value = inspect.getattr_static(value, part, None)
        home = getattr(value, "__module__", None) or ""
        is_ours = home.startswith("transformer_jax")
        if callable(value) and is_ours and not name.endswith("setup"):
            return f"{home}.{value.__qualname__}"
    return None


def arguments(documented: Any) -> set[str]:
    """Return the names of the arguments of a function or the fields of a class."""
    names: set[str] = set()
    for base in getattr(documented, "__mro__", ()):
        names |= set(vars(base).get("__annotations__", {}))
    with contextlib.suppress(TypeError, ValueError):  # not callable
        names |= set(inspect.signature(documented).parameters)
    return names
