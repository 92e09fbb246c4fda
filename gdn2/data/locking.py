"""A folder that one process writes to at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes from locking an existing folder, which a ValueError calls `name`; a kill frees it.

    Where the system or the file system has no locks, nobody is kept out.
    """
    if os.name != "posix":
        yield
        return
    import fcntl  # noqa: PLC0415 (elsewhere there is none)

    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{name}: {folder} is being written by another process") from None
        except OSError:
            pass
        yield
    finally:
        os.close(opened)
