"""Files with certificates and secrets, which are renewed in place."""

from pathlib import Path
from stat import S_ISREG
from typing import Final, TypeAlias

from exporter.net.errors import RefusedError, system_error

__all__ = ["SecretFile", "Stamp", "file_stamp"]

# Kubernetes swaps a symbolic link: then the inode differs, even if the times are equal.
Stamp: TypeAlias = tuple[int, int, int]

_MOST_BYTES: Final = 65_536


def file_stamp(path: str | None) -> Stamp | None:
    """Time, size and inode of a file, which change when it is renewed; None if there is none."""
    try:
        stat = Path(path).stat() if path else None
    except OSError:
        return None
    return stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino)


class SecretFile:
    """A secret in a file, read again only after the file has changed."""

    def __init__(self, path: str, name: str) -> None:
        self._path = Path(path)
        self.name = name  # for error messages, such as ``the bearer token file``; they never show the path
        self._stamp: Stamp | None = None
        self._text = ""

    def read(self) -> str:
        """Return the text without space around it; raises RefusedError if the file cannot be read."""
        try:
            stat = self._path.stat()
            if not S_ISREG(stat.st_mode):  # a pipe would block everything
                raise RefusedError("unreachable", f"{self.name} is not a regular file")
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._stamp:
                with self._path.open("rb") as file:
                    self._text = file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
                self._stamp = stamp
        except OSError as problem:
            detail = f"cannot read {self.name}: {system_error(problem.errno)}"
            raise RefusedError("unreachable", detail) from problem
        return self._text
