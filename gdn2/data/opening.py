"""Files of bytes, plain or compressed, that never pass off a part as the whole."""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from gdn2.data.extras import need

COMPRESSED = (".gz", ".zst")
CHUNK = 2**20
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)


class Opened:
    """A file's content, decompressed, and how much of the file itself has been read.

    Opening it empty, or leaving it because it is damaged, is a ValueError that says so.
    """

    def __init__(self, path: Path) -> None:
        # The libraries take nothing for an archive of nothing, but every archive begins with a header.
        if path.suffix.lower() in COMPRESSED and path.stat().st_size == 0:
            raise ValueError(f"{path}: damaged (it is empty), expected a whole file")
        self._path, self._file = path, path.open("rb")
        self.content: BinaryIO = _decompressed(path, self._file)

    @property
    def read(self) -> int:
        return self._file.tell()

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, _: object, reason: object, __: object) -> None:
        self._file.close()
        if isinstance(reason, DAMAGE):
            raise ValueError(f"{self._path}: damaged ({reason}), expected a whole file") from None


def _decompressed(path: Path, file: BinaryIO) -> Any:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(file)
        case ".zst":
            return io.BufferedReader(_Zstandard(path, file), CHUNK)
    return file


class _Zstandard(io.RawIOBase):
    """Frames of zstd one after the other; the library's own reader takes a file cut short for a whole one."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        library = need("zstandard", "data", str(path))
        # Files packed with zstd --long need more than the library allows on its own.
        self._new_frame = library.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._damage = library.ZstdError
        self._file, self._frame = file, None
        self._packed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(CHUNK)
            if not packed and self._frame is not None:
                raise EOFError("the file ends early")
            if not packed:
                return 0
            self._advance(packed)
        count = min(len(target), len(self._ready))
        target[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _advance(self, packed: bytes) -> None:
        frame: Any = self._frame or self._new_frame()
        try:
            self._ready = frame.decompress(packed)
        except self._damage as reason:
            raise EOFError(str(reason)) from None
        self._packed = frame.unused_data
        self._frame = None if frame.eof else frame
