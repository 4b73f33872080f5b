"""Files written whole or not at all: a reader never sees half of one."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from detaudit.core.errors import TraceNotWritten

_ADVICE = {
    errno.ENOENT: "the folder does not exist; create it or choose another path",
    errno.EACCES: "permission denied; choose a folder you may write to",
    errno.EPERM: "permission denied; choose a folder you may write to",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EISDIR: "it is a folder; give the name of a file",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another path",
    errno.ENOSPC: "the disk is full; free some space or choose another disk",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another disk",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


def not_written(path: str | os.PathLike[str], error: OSError) -> TraceNotWritten:
    """The one-line error for ``error``, met while writing ``path``."""
    reason = _ADVICE.get(error.errno or 0) or f"{error.strerror or error}; choose another path"
    return TraceNotWritten(f"cannot write {os.fspath(path)}: {reason}")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out before long work that ``path`` cannot be written, as far as that shows; writes nothing.

    Raises:
        TraceNotWritten: its folder does not exist or may not be written to, or it is a folder itself.
    """
    real = Path(os.path.realpath(path))
    try:
        mode = _mode_of(real)
        folder = _mode_of(real.parent)
        if mode is not None and stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        replaced = mode is None or stat.S_ISREG(mode)
        if not os.access(real.parent if replaced else real, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise not_written(path, error) from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8; see ``write_bytes``."""
    write_bytes(path, text.encode("utf-8", errors="surrogateescape"))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step, keeping an existing file's permissions.

    A link is followed. What is not a regular file (a pipe, ``/dev/stdout``) is written straight through.

    Raises:
        TraceNotWritten: the file could not be written; what was at ``path`` before is still there.
    """
    try:
        real = Path(os.path.realpath(path))
        mode = _mode_of(real)
        if mode is not None and not stat.S_ISREG(mode):
            real.write_bytes(data)
        else:
            _replace(real, data, mode)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise not_written(path, error) from error


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    # Beside the file, since a rename is atomic only within one file system; created by os.open rather
    # than tempfile, so that the user's umask decides the permissions.
    temporary = path.parent / f".{path.name[:200]}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
