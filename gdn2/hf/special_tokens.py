"""What transformers has to be told about a model folder's tokenizer to see the same tokens as we do."""

# mypy: disable-error-code="no-untyped-call"
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from gdn2.models.files import read_json, write_json

CONFIG, JSON, SENTENCEPIECE = "tokenizer_config.json", "tokenizer.json", "tokenizer.model"


def write_special_tokens(folder: Path, bos_id: int | None, eos_id: int | None) -> None:
    """Write generation_config.json, and into tokenizer_config.json what it does not say yet.

    A tokenizer.json does not say which of its tokens open and end a text. A SentencePiece model that has none beside it
    does, but without its class transformers would put no token before a text, and no space.
    """
    generation = GenerationConfig(bos_token_id=bos_id, eos_token_id=eos_id, pad_token_id=eos_id)
    generation.save_pretrained(folder)
    found: dict[str, Any] = {}
    if (folder / SENTENCEPIECE).is_file() and not (folder / JSON).is_file():
        found = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": bos_id is not None}
    special = {"bos_token": bos_id, "eos_token": eos_id}
    known = {name: token for name, token in special.items() if token is not None}
    if known:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found |= {name: tokenizer.convert_ids_to_tokens(token) for name, token in known.items()}
    if found:
        file = folder / CONFIG
        write_json(file, found | (read_json(file) if file.exists() else {}))
