"""What there is to choose about data, and the way from the choice to the rows."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gdn2.data.batch import Source
from gdn2.data.checks import require, require_integer
from gdn2.data.corpus import Split, documents
from gdn2.data.loader import Documents, Windows
from gdn2.data.mixture import Mixture
from gdn2.data.shards import TokenFolder, read_index
from gdn2.data.stream import ByteStream
from gdn2.data.synthetic import (
    CopyConfig,
    NeedleConfig,
    ParityConfig,
    PermutationConfig,
    RecallConfig,
    Task,
)

VALIDATION_SEED = 0  # of every run, so that the losses of several can be compared


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """A folder of token shards; validation has a folder of its own or the last part of the tokens."""

    type: Literal["tokens"] = "tokens"
    path: str
    documents: Documents = "run_on"
    shuffle: bool = True
    validation_path: str | None = None
    validation_fraction: float = 0.005  # of the tokens, unless there is a validation_path; 0: none

    def __post_init__(self) -> None:
        _check_documents(self.documents)
        fits = 0 <= self.validation_fraction < 1
        expected = "at least 0 and less than 1"
        require(fits, "validation_fraction", self.validation_fraction, expected)
        object.__setattr__(self, "path", at_home(self.path))
        if self.validation_path is not None:
            object.__setattr__(self, "validation_path", at_home(self.validation_path))


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """The source text of the running Python's standard library, in bytes."""

    type: Literal["python"] = "python"
    documents: Documents = "run_on"

    def __post_init__(self) -> None:
        _check_documents(self.documents)


PartConfig = (
    TokensConfig
    | CorpusConfig
    | RecallConfig
    | NeedleConfig
    | CopyConfig
    | ParityConfig
    | PermutationConfig
)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Rows of several parts, in the proportion of their weights."""

    type: Literal["mixture"] = "mixture"
    parts: tuple[PartConfig, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "weights", tuple(self.weights))
        require(len(self.parts) > 0, "parts", self.parts, "at least one part")
        fits = len(self.weights) == len(self.parts)
        require(fits, "weights", self.weights, f"one for each of {len(self.parts)} parts")
        positive = all(0 < weight < math.inf for weight in self.weights)
        require(positive, "weights", self.weights, "finite numbers above 0")


DataConfig = PartConfig | MixtureConfig


def at_home(path: str) -> str:
    """A path whose ~ is the user's home: shells read it so only where nothing stands before it."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:  # no such user
        return path


def open_source(config: DataConfig, length: int, seed: int, split: Split) -> Source:
    """Rows of `length` tokens; those for validation are the same for every seed."""
    require_integer("length", length, 1)
    fits = type(seed) is int and 0 <= seed < 2**64
    require(fits, "seed", seed, "an integer of at least 0 and less than 2^64")
    require(split in get_args(Split), "split", split, f"one of {', '.join(get_args(Split))}")
    order = _order(seed, split)
    match config:
        case TokensConfig():
            return _tokens(config, length, order, split)
        case CorpusConfig():
            stream = ByteStream(documents(split))
            return Windows(stream, length, seed=order, documents=config.documents)
        case MixtureConfig():
            return _mixture(config, length, seed, split)
        case _:
            return Task(config, length, order, split)


def holds_out(config: DataConfig) -> bool:
    """Whether there are rows for validation."""
    match config:
        case TokensConfig():
            return config.validation_path is not None or config.validation_fraction > 0
        case MixtureConfig():
            return any(holds_out(part) for part in config.parts)
    return True


def _mixture(config: MixtureConfig, length: int, seed: int, split: Split) -> Mixture:
    """Validation is of those parts that hold something out."""
    shards = [part.path for part in config.parts if isinstance(part, TokensConfig)]
    for path in shards[1:]:
        _check_tokenizers("parts", shards[0], path)
    pairs = zip(config.parts, config.weights, strict=True)
    used = [(part, weight) for part, weight in pairs if split == "train" or holds_out(part)]
    parts = [open_source(part, length, seed, split) for part, _ in used]
    return Mixture(parts, [weight for _, weight in used], _order(seed, split))


def _order(seed: int, split: Split) -> int:
    return seed if split == "train" else VALIDATION_SEED


def _tokens(config: TokensConfig, length: int, seed: int, split: Split) -> Windows:
    """Validation is shuffled in any case: its first rows are to stand for all of it."""
    is_training, path, kept = split == "train", config.path, config.validation_fraction
    if config.validation_path is not None:
        _check_tokenizers("validation_path", config.path, config.validation_path)
        path, kept = (path, 0.0) if is_training else (config.validation_path, 1.0)
    folder = TokenFolder(Path(path))
    border = folder.tokens - math.floor(folder.tokens * kept)
    begin, end = (0, border) if is_training else (border, folder.tokens)
    expected = f"less than the {end - begin} tokens of {path} for {split}"
    if not is_training and config.validation_path is None:
        expected += f", validation_fraction {kept:g} of all; 0 is no validation"
    require(length < end - begin, "length", length, expected)
    return Windows(
        folder,
        length,
        seed=seed,
        begin=begin,
        end=end,
        documents=config.documents,
        shuffle=config.shuffle or not is_training,
    )


def _check_tokenizers(name: str, path: str, other: str) -> None:
    """Refuse tokens of another tokenizer: a loss on them would be a number without a meaning."""
    expected, found = (read_index(Path(p)).get("tokenizer") for p in (path, other))
    same = expected is None or found is None or expected == found
    require(same, name, other, f"tokens of the tokenizer of {path}")


def _check_documents(documents: str) -> None:
    known = get_args(Documents)
    require(documents in known, "documents", documents, f"one of {', '.join(map(repr, known))}")
