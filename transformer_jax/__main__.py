r"""Run a script by its name, in any folder.

    python -m transformer_jax train --config=dates --workdir=runs/dates

is the same as, in a clone,

    python scripts/train.py --config=configs/dates.py --workdir=runs/dates

Without a name, the scripts are listed. `python -m transformer_jax train --help` lists
the options of one.
"""

import ast
import os
import runpy
import sys
from pathlib import Path

from transformer_jax import shipped


def main() -> None:
    """Run the script that the first argument names."""
    scripts = {path.stem: path for path in (shipped.folder() / "scripts").glob("*.py")}
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print(overview(scripts))
        return
    if name not in scripts:
        names = ", ".join(sorted(scripts))
        print(f"error: {name!r} is no script: choose one of {names}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [os.fspath(scripts[name]), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def overview(scripts: dict[str, Path]) -> str:
    """Return the docstring of this module, and the first sentence of each script's."""
    lines = [(__doc__ or "").strip(), "", "Scripts:"]
    for name, path in sorted(scripts.items()):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        sentence = " ".join(docstring.partition("\n\n")[0].split())
        lines.append(f"  {name}: {sentence}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
