"""A disk whose calls fail."""

import builtins
import contextlib
import errno
import io
import os
import pathlib
import shutil

import pytest

CALLS = {
    os: (
        "stat",
        "lstat",
        "open",
        "listdir",
        "scandir",
        "mkdir",
        "rename",
        "replace",
        "unlink",
        "remove",
        "rmdir",
    ),
    builtins: ("open",),
    io: ("open",),
}


class Disk:
    """Counts the calls on files below a folder, and lets one of them fail.

    With `path`, only calls on this path below the folder count.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        number: int = errno.EIO,
        fail_at: int = 0,
        path: str = "",
    ):
        self._folder, self._number, self._fail_at = str(folder), number, fail_at
        self._path = path
        self.count, self.failed = 0, ""

    def _counts(self, path: object) -> bool:
        if not isinstance(path, str | os.PathLike):
            return False
        name = os.fspath(path)
        return name.startswith(self._folder) and name.endswith(self._path)

    def _wrapped(self, name, call):
        def checked(path, *args, **kwargs):
            if self._counts(path):
                self.count += 1
                if self.count == self._fail_at:
                    self.failed = f"{name} {os.fspath(path).removeprefix(self._folder)}"
                    raise OSError(
                        self._number, os.strerror(self._number), os.fspath(path)
                    )
            return call(path, *args, **kwargs)

        return checked

    @contextlib.contextmanager
    def mounted(self):
        with pytest.MonkeyPatch.context() as patch:
            for owner, names in CALLS.items():
                for name in names:
                    patch.setattr(
                        owner, name, self._wrapped(name, getattr(owner, name))
                    )
            # They check at import whether the calls exist, and call them through these
            # names.
            patch.setattr(shutil, "_use_fd_functions", False)
            yield self
