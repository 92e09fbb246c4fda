"""What data hold, wherever they lie: how a resumed run knows them again."""

import hashlib
from functools import cache
from pathlib import Path

from gdn2.data.config import CorpusConfig, DataConfig, MixtureConfig, TokensConfig
from gdn2.data.corpus import documents
from gdn2.data.shards import INDEX, read_index


def digests(config: DataConfig) -> dict[str, str]:
    """SHA-256 of what names in a config stand for: folders of shards by their index, the library by its text.

    A folder's index holds the checksums of its files, so that it stands for them.
    """
    match config:
        case TokensConfig():
            paths = {"path": config.path, "validation_path": config.validation_path}
            return {name: _index_digest(Path(path)) for name, path in paths.items() if path}
        case CorpusConfig():
            return {"type": _library_digest()}
        case MixtureConfig():
            parts = enumerate(map(digests, config.parts))
            return {f"parts[{i}].{name}": x for i, part in parts for name, x in part.items()}
    return {}


def _index_digest(folder: Path) -> str:
    read_index(folder)  # names what is wrong with it
    return hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()


@cache
def _library_digest() -> str:
    found = hashlib.sha256()
    for text in documents():
        found.update(text.encode())
    return found.hexdigest()
