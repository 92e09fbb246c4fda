"""From text to token ids and back."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from gdn2.data.byte_tokenizer import BYTES, JSON, ByteTokenizer
from gdn2.data.extras import need
from gdn2.data.sentencepiece_json import as_json
from gdn2.data.tokenizer_config import (
    MADE_FROM_MODEL,
    is_made_from,
    read_beside,
    save_config,
    special_token,
)

SENTENCEPIECE = "tokenizer.model"
GPT2_FILES = ("vocab.json", "merges.txt")
END_OF_TEXT = "<|endoftext|>"  # stands between documents in vocabularies made after GPT-2's


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    @property
    def name(self) -> str:
        """What it is: bytes, or the name of its file."""
        ...

    @property
    def sha256(self) -> str | None:
        """The checksum of its file."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that opens a document."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that may go on: with those that the tokenizer puts before it, and none after it."""
        ...

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of texts alone: nothing is added, and what looks like a special token is text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        ...

    def save(self, folder: Path) -> None:
        """Write files from which `load_tokenizer` makes the same tokenizer again."""
        ...


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn any exception into a ValueError: the library says what it cannot encode by one of no kind."""
    try:
        yield
    except Exception as reason:
        line = " ".join(str(reason).split())
        raise ValueError(f"{name}: got {line}, expected one that encodes any text") from None


class JsonTokenizer:
    """A tokenizer of the library tokenizers, from its tokenizer.json."""

    def __init__(self, content: str, *, sha256: str, config: bytes | None = None) -> None:
        """Read the content of a tokenizer.json, and of a tokenizer_config.json, which names special tokens."""
        self.name, self.sha256 = JSON, sha256
        self._content, self._config = content, config
        self._inner = self._read()

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again from the file: a copy by the library would see special tokens in texts again."""
        return partial(JsonTokenizer, sha256=self.sha256, config=self._config), (self._content,)

    @cached_property
    def vocab_size(self) -> int:
        return max(self._inner.get_vocab().values(), default=-1) + 1

    @cached_property
    def bos_id(self) -> int | None:
        return self._special("bos_token", self._added[0])

    @cached_property
    def eos_id(self) -> int | None:
        return self._special("eos_token", self._added[1])

    def token_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        with _named(self.name):
            return list(self._inner.encode(text).ids[: -len(self._added[1]) or None])

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _named(self.name):
            coded = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in coded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids))

    def save(self, folder: Path) -> None:
        (folder / JSON).write_text(self._content, encoding="utf-8", newline="")
        save_config(folder, self._config)

    def _read(self) -> tokenizers.Tokenizer:
        inner = tokenizers.Tokenizer.from_str(self._content)
        inner.no_truncation()  # a file may say to cut texts off, or to fill them up
        inner.no_padding()
        return inner

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same, blind to special tokens."""
        inner = self._read()
        inner.encode_special_tokens = True
        return inner

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """What the tokenizer adds before and after a text."""
        whole = self._inner.encode("a").ids
        bare = self._inner.encode("a", add_special_tokens=False).ids
        for i in range(len(whole) - len(bare) + 1):
            if whole[i : i + len(bare)] == bare:
                return whole[:i], whole[i + len(bare) :]
        return [], []

    def _special(self, kind: str, added: list[int]) -> int | None:
        token = special_token(json.loads(self._config or b"{}"), kind)
        named = None if token is None else self.token_id(token)
        return next((i for i in (named, *added, self.token_id(END_OF_TEXT)) if i is not None), None)


class SentencePieceTokenizer:
    """A SentencePiece model, such as Llama 2's."""

    def __init__(self, file: Path) -> None:
        library = need("sentencepiece", "data", f"the tokenizer {file}")
        self._content = file.read_bytes()
        self._config = read_beside(file)
        try:
            if not self._content:  # which the library takes for no model at all, and says nothing
                raise RuntimeError
            self._inner: Any = library.SentencePieceProcessor(model_proto=self._content)
        except RuntimeError:
            raise ValueError(f"{file}: damaged, expected a SentencePiece model") from None
        self.name, self.sha256 = SENTENCEPIECE, hashlib.sha256(self._content).hexdigest()
        self.vocab_size: int = self._inner.vocab_size()
        self.bos_id = self._if_any(self._inner.bos_id())
        self.eos_id = self._if_any(self._inner.eos_id())

    def token_id(self, token: str) -> int | None:
        found = self._inner.piece_to_id(token)
        return found if self._inner.id_to_piece(found) == token else None

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_bos=self.bos_id is not None)

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self._inner.encode(text), np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([int(i) for i in ids if i < self.vocab_size])

    def save(self, folder: Path) -> None:
        (folder / SENTENCEPIECE).write_bytes(self._content)
        if self._json is not None:
            (folder / JSON).write_bytes(self._json)
        save_config(folder, json.dumps(self._described(), indent=1).encode())

    @cached_property
    def _json(self) -> bytes | None:
        made = as_json(self._inner)
        return None if made is None else made.encode()

    def _described(self) -> dict[str, Any]:
        """What transformers has to be told to see the same tokens: alone it puts no token before a text."""
        special = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        tokens = {n: self._inner.id_to_piece(i) for n, i in special.items() if i is not None}
        given = json.loads(self._config or b"{}")
        if self._json is None:
            usual = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": "bos_token" in tokens}
            return given or usual | tokens
        made = {MADE_FROM_MODEL: hashlib.sha256(self._json).hexdigest()}
        return tokens | given | made | {"tokenizer_class": "PreTrainedTokenizerFast"}

    @staticmethod
    def _if_any(token: int) -> int | None:
        return token if token >= 0 else None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer called "bytes", or that of a file, or of a folder that holds its files.

    Files are a tokenizer.json, a SentencePiece model (.model), or GPT-2's pair of vocab.json and merges.txt.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name)
    known = [path / JSON, path / SENTENCEPIECE, path / GPT2_FILES[0]] if path.is_dir() else [path]
    if path.is_dir() and is_made_from(path / SENTENCEPIECE, path / JSON):
        known.pop(0)
    for file in filter(Path.is_file, known):
        if file.name == GPT2_FILES[0]:
            return _load_gpt2(file.parent)
        if file.suffix == ".json":
            content = file.read_bytes()
            return _json_tokenizer(file, content.decode(errors="replace"), content)
        if file.suffix == ".model":
            return SentencePieceTokenizer(file)
    expected = f"{BYTES!r} or a {JSON}, a {SENTENCEPIECE}, or a folder with one"
    raise ValueError(f"tokenizer: got {str(name)!r}, expected {expected}")


def _load_gpt2(folder: Path) -> JsonTokenizer:
    """The byte-level BPE of a vocab.json and a merges.txt."""
    vocab, merges = (folder / name for name in GPT2_FILES)
    if not merges.is_file():
        raise ValueError(f"{merges}: there is no such file, expected one beside {vocab.name}")
    try:
        own = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    except Exception as reason:
        raise _broken(vocab, reason, "a vocabulary with its merges") from None
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    if own.token_to_id(END_OF_TEXT) is not None:
        own.add_special_tokens([END_OF_TEXT])
    return _json_tokenizer(vocab, own.to_str(), vocab.read_bytes() + merges.read_bytes())


def _json_tokenizer(file: Path, content: str, hashed: bytes) -> JsonTokenizer:
    sha256, config = hashlib.sha256(hashed).hexdigest(), read_beside(file)
    try:
        return JsonTokenizer(content, sha256=sha256, config=config)
    except Exception as reason:  # the library raises nothing narrower
        raise _broken(file, reason, f"a {JSON}") from None


def _broken(file: Path, reason: Exception, expected: str) -> ValueError:
    return ValueError(f"{file}: got {' '.join(str(reason).split())}, expected {expected}")
