"""The tokenizer_config.json beside a tokenizer's file, which names its special tokens."""

import json
from pathlib import Path
from typing import Any

from gdn2.data.checks import require

CONFIG = "tokenizer_config.json"
MADE_FROM = (
    "made_from"  # the file that the tokenizer.json beside it was made from, and says the same as
)


def read_beside(file: Path) -> bytes | None:
    """Its content, if there is one."""
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
    """How it writes a token; some files say more of it in a table."""
    token = table.get(kind)
    return token.get("content") if isinstance(token, dict) else token


def save_config(folder: Path, config: bytes | None) -> None:
    if config is not None:
        (folder / CONFIG).write_bytes(config)
