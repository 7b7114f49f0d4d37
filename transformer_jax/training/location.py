"""The path of the folder of a run while it trains: somebody may rename or remove it."""

import os

from etils import epath

from transformer_jax.errors import UserError


class Moved(UserError):
    """The workdir of a run was renamed or removed while it trained."""


def identity(folder: epath.PathLike) -> list[int] | None:
    """Return the numbers of device and inode of a local folder, and None if there are
    none.

    A copy of the folder has other numbers; the folder under another name has the same.
    """
    if "://" in os.fspath(folder):
        return None
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return [status.st_dev, status.st_ino]


class Location:
    """Follows a folder through renaming. Folders in buckets always count as in
    place.
    """

    def __init__(self, folder: epath.PathLike):
        self._path = os.fspath(folder)
        self._identity = identity(folder)
        self._open: int | None = None
        if self._identity is not None:
            self._open = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)

    def moved(self) -> str | None:
        """Return None if the folder is in place, its new path if it was renamed, and ""
        if it was removed.

        Without /proc, i.e. not on Linux, the new path is unknown and the folder counts
        as removed.
        """
        if self._open is None:
            return None
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # the disk fails: nothing is known
            return None
        else:
            if [status.st_dev, status.st_ino] == self._identity:
                return None
        try:
            path = os.readlink(f"/proc/self/fd/{self._open}")
        except OSError:
            return ""
        return path if identity(path) == self._identity else ""

    def close(self) -> None:
        """Close the open folder, if there is one."""
        if self._open is not None:
            os.close(self._open)
            self._open = None
