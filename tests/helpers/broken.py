"""A trained run, and files that a user may pass to a script by mistake: broken
copies of the run, odd files.
"""

import gzip
import os
import shutil
from pathlib import Path


def make(folder: Path, trained: Path) -> Path:
    """Copy the run `trained` to `folder`/run, add the broken copies and the odd files,
    and return the folder.
    """
    shutil.copytree(trained, folder / "run")
    _files(folder)
    for name in ("torn", "list", "task", "untrained", "wordless", "swapped", "damaged"):
        shutil.copytree(folder / "run", folder / name)
    (folder / "torn" / "config.json").write_bytes(
        (folder / "run" / "config.json").read_bytes()[:-9]
    )
    (folder / "list" / "config.json").write_text("[]")
    (folder / "task" / "config.json").write_text('{"task": "translation", "model": {}}')
    shutil.rmtree(folder / "untrained" / "checkpoints")
    (folder / "wordless" / "tokenizer.json").unlink()
    (folder / "swapped" / "tokenizer.json").write_text("{}")
    for path in (folder / "damaged" / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}")
    (folder / "bare").mkdir()
    return folder


def _files(folder: Path) -> None:
    (folder / "lines.txt").write_text("ek at\nut\n")
    (folder / "old.txt").write_text("what a former run predicted\n")
    (folder / "blank.txt").write_text("\n  \n")
    (folder / "latin1.txt").write_bytes("ek\nd\xe9j\xe0\n".encode("latin1"))
    (folder / "utf16.txt").write_bytes("ek at\n".encode("utf-16"))
    (folder / "lines.txt.gz").write_bytes(gzip.compress(b"ek at\n"))
    (folder / "folder").mkdir()
    (folder / "link.txt").symlink_to("lines.txt")
    (folder / "nowhere.txt").symlink_to("none/lines.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    os.link(folder / "lines.txt", folder / "hard.txt")
