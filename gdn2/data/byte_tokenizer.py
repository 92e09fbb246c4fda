"""The tokenizer that needs no file, and the file that says the same to every reader of such files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

BYTES, JSON = "bytes", "tokenizer.json"


class ByteTokenizer:
    """The bytes of UTF-8 are the tokens."""

    name = BYTES
    sha256 = None
    vocab_size = 256
    bos_id = None
    eos_id = None

    def token_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; what is no byte, or bytes that make no character, become replacement characters."""
        known = (bytes([i]) if i < self.vocab_size else b"\xff" for i in ids)
        return b"".join(known).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write a tokenizer.json whose 256 tokens are the bytes, which every reader of such files understands."""
        own = tokenizers.Tokenizer(
            tokenizers.models.BPE({letter: byte for byte, letter in enumerate(_letters())}, [])
        )
        own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        own.decoder = tokenizers.decoders.ByteLevel()
        own.save(str(folder / JSON))


def _letters() -> list[str]:
    """The visible character by which byte-level vocabularies write each byte."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    visible += range(ord("®"), ord("ÿ") + 1)
    letters = {byte: chr(byte) for byte in visible}
    others = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
