"""The tokenizer_config.json beside a tokenizer's file, which names its special tokens."""

import hashlib
import json
from pathlib import Path
from typing import Any

from gdn2.data.checks import require

CONFIG = "tokenizer_config.json"
# the checksum of a tokenizer.json that was made from the SentencePiece model beside it, and says the same
MADE_FROM_MODEL = "made_from_model"


def read_beside(file: Path) -> bytes | None:
    """The content of the one beside a tokenizer's file, if there is one; what it says is checked."""
    config = file.with_name(CONFIG)
    if not config.is_file():
        return None
    content = config.read_bytes()
    try:
        table = json.loads(content)
    except ValueError as reason:
        raise ValueError(f"{config}: got {reason}, expected JSON") from None
    require(isinstance(table, dict), f"{config}", table, "a table")
    for kind in ("bos_token", "eos_token"):
        token = special_token(table, kind)
        require(token is None or isinstance(token, str), f"{config}: {kind}", token, "a string")
    return content


def special_token(table: dict[str, Any], kind: str) -> Any:
    """How a config writes the token of a kind, such as bos_token; some files say more of it in a table."""
    token = table.get(kind)
    return token.get("content") if isinstance(token, dict) else token


def is_made_from(model: Path, file: Path) -> bool:
    """Whether a tokenizer.json is still the one that was made from the model beside it."""
    made = json.loads(read_beside(file) or b"{}").get(MADE_FROM_MODEL)
    known = made is not None and model.is_file() and file.is_file()
    return known and hashlib.sha256(file.read_bytes()).hexdigest() == made


def save_config(folder: Path, config: bytes | None) -> None:
    if config is not None:
        (folder / CONFIG).write_bytes(config)
