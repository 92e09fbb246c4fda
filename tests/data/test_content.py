"""Digests tell data that moved from data that changed."""

import hashlib
import shutil
from pathlib import Path

import pytest

from gdn2.data.config import CorpusConfig, MixtureConfig, TokensConfig
from gdn2.data.content import digests
from gdn2.data.corpus import documents
from gdn2.data.synthetic import ParityConfig
from tests.data.cases import write_folder


def test_a_folder_is_its_index_wherever_it_lies(tmp_path: Path) -> None:
    here = write_folder(tmp_path / "here", [30, 5])
    there = Path(shutil.copytree(here, tmp_path / "there"))
    other = write_folder(tmp_path / "other", [30, 6])
    expected = hashlib.sha256((here / "index.json").read_bytes()).hexdigest()
    assert digests(TokensConfig(path=str(here))) == {"path": expected}
    both = digests(TokensConfig(path=str(there), validation_path=str(other)))
    assert both["path"] == expected != both["validation_path"]
    with pytest.raises(ValueError, match=r"nowhere.index.json: No such file"):
        digests(TokensConfig(path=str(tmp_path / "nowhere")))


def test_parts_and_the_library_and_tasks(tmp_path: Path) -> None:
    here = write_folder(tmp_path / "here", [30])
    parts = (CorpusConfig(), TokensConfig(path=str(here)))
    text = hashlib.sha256("".join(documents()).encode()).hexdigest()
    index = hashlib.sha256((here / "index.json").read_bytes()).hexdigest()
    mixed = MixtureConfig(parts=parts, weights=(1, 1))
    assert digests(mixed) == {"parts[0].type": text, "parts[1].path": index}
    assert digests(ParityConfig()) == {}
