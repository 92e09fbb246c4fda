"""From text to token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

BYTES = "bytes"


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer adds to it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8 are the tokens."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text; what is no byte, or bytes that make no character, become replacement characters."""
        known = (bytes([i]) if i < self.vocab_size else b"\xff" for i in ids)
        return b"".join(known).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json, as the library tokenizers writes it."""

    def __init__(self, file: Path) -> None:
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as reason:  # the library raises nothing narrower
            line = " ".join(str(reason).split())
            raise ValueError(f"{file}: got {line}, expected a tokenizer.json") from None

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids))


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer called "bytes", or that of a tokenizer.json or of a folder with one."""
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer: got {str(name)!r}, expected {BYTES!r} or a tokenizer.json")
    return JsonTokenizer(file)
