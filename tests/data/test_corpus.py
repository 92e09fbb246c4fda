"""The standard library's text: the same at each call, split without overlap, free of what was installed or tests."""

import argparse
import sysconfig
from pathlib import Path

import pytest

from gdn2.data import corpus


def test_splits_are_the_library_and_do_not_meet() -> None:
    train, held_out = corpus.library_files("train"), corpus.library_files("validation")
    assert sorted([*train, *held_out]) == sorted(corpus.library_files())
    assert not set(train) & set(held_out)
    assert 0.02 < len(held_out) / len(train) < 0.1
    assert Path(argparse.__file__).resolve() in [file.resolve() for file in [*train, *held_out]]
    root = Path(sysconfig.get_path("stdlib"))
    assert train == [file for file in corpus.library_files() if file in set(train)]
    parts = {part for file in [*train, *held_out] for part in file.relative_to(root).parts}
    assert not parts & {"site-packages", "test", "tests", "__pycache__"}


def test_documents_are_the_files_texts() -> None:
    texts = list(corpus.documents("validation"))
    files = [file.read_bytes().decode() for file in corpus.library_files("validation")]
    assert texts == [text for text in files if text]
    assert texts == list(corpus.documents("validation"))
    assert sum(map(len, corpus.documents())) > 5e6


def test_what_is_no_text_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"got no .py file, expected Python's standard library"):
        corpus.library_files()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.py").write_text("z = 'é'\n")
    (tmp_path / "b" / "tests").mkdir()
    (tmp_path / "b" / "tests" / "t.py").write_text("t")
    (tmp_path / "a.py").write_bytes(b"\xff")
    (tmp_path / "c.py").touch()
    assert list(corpus.documents()) == ["z = 'é'\n"]
