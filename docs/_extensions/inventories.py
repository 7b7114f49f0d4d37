"""Links to the documentation of other projects, without the network.

A file NAME.txt in docs/_inventories has the address of a project's documentation in its
first line. Each other line has a name in the form in which Sphinx meets it, its role,
and its page.
"""

import zlib
from pathlib import Path

HEADER = "# Sphinx inventory version 2\n# Project: {}\n# Version: \n# zlib\n"


def write(folder: Path, target: Path) -> dict[str, tuple[str, str]]:
    """Write each inventory as Sphinx reads it. Return the value of `intersphinx_mapping`."""
    target.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for path in sorted(folder.glob("*.txt")):
        address, *lines = path.read_text().splitlines()
        entries = []
        for line in lines:
            name, role, page = line.split()
            entries.append(f"{name} {role} 1 {page} -\n")
        written = target / f"{path.stem}.inv"
        written.write_bytes(HEADER.format(path.stem).encode() + zlib.compress("".join(entries).encode()))
        mapping[path.stem] = (address, str(written))
    return mapping
