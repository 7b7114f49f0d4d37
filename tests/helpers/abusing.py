"""Requirements for every refusal of a script: one error message, no traceback, and
no file lost.
"""

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def contents(folder: Path) -> dict[str, str]:
    """Return the contents of `folder`: a hash of each file, the target of each link,
    "folder" for each folder.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(
                path.read_bytes()
            ).hexdigest()
        else:
            found[str(path.relative_to(folder))] = (
                "folder" if path.is_dir() else "special"
            )
    return found


@contextlib.contextmanager
def unharmed(*folders: Path, new: tuple[str, ...] = ()) -> Iterator[None]:
    """Assert that the block leaves everything below the folders unchanged, byte for
    byte.

    Nothing may be added, except files and folders with a name in `new`. A missing
    folder must not be created.
    """
    before = {
        folder: contents(folder) if folder.exists() else None for folder in folders
    }
    yield
    for folder, there in before.items():
        if there is None:
            assert not folder.exists(), f"{folder} has been created"
            continue
        now = contents(folder)
        lost = {name for name in there if now.get(name) != there[name]}
        added = {
            name
            for name in now.keys() - there.keys()
            if not set(Path(name).parts) & set(new)
        }
        assert not lost, f"lost or changed: {sorted(lost)}"
        assert not added, f"left behind: {sorted(added)}"


def refused(result: subprocess.CompletedProcess, *words: str, code: int = 2) -> str:
    """Assert a refusal: its exit code, nothing on stdout, one error message with all
    `words`, no traceback.

    Return the message, without "error: ". Log lines may come before it.
    """
    stdout, stderr = (
        text.decode() if isinstance(text, bytes) else text
        for text in (result.stdout, result.stderr)
    )
    assert result.returncode == code, f"exit code {result.returncode}: {stderr[-3000:]}"
    assert stdout == "", f"unexpected output on stdout: {stdout[:500]}"
    assert "Traceback" not in stderr, stderr[-3000:]
    assert f"\n{stderr}".count("\nerror: ") == 1, (
        f"expected exactly one error message: {stderr[-3000:]}"
    )
    message = f"\n{stderr}".partition("\nerror: ")[2].strip()
    missing = [word for word in words if word not in message]
    assert not missing, f"the message lacks {missing}: {message[-3000:]}"
    return message
