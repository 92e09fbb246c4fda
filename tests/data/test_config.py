"""From the choice of data to its rows: files read back, splits that never meet, mistakes that say where they are."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gdn2.data.config import (
    CorpusConfig,
    DataConfig,
    MixtureConfig,
    TokensConfig,
    holds_out,
    open_source,
)
from gdn2.data.corpus import documents
from gdn2.data.synthetic import ParityConfig, RecallConfig, Task
from gdn2.layers.plain import from_plain, to_plain
from tests.data.cases import write_folder

LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class File:
    """A config file with a section `data`."""

    data: DataConfig


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_folder(tmp_path / "tokens", [100, 1, 300, 599]))


def seen(config: DataConfig, split: str, rows: int = 8000) -> set[int]:
    """All tokens of many epochs, those that are only targets too."""
    batch = open_source(config, LENGTH, 0, split).batch(0, rows)  # type: ignore[arg-type]
    return set(batch.ids.flatten().tolist()) | set(batch.targets.flatten().tolist())


@pytest.mark.parametrize(
    "config",
    [
        TokensConfig(path="here", documents="apart", shuffle=False, validation_path="there"),
        CorpusConfig(),
        RecallConfig(pairs=3),
        MixtureConfig(parts=(CorpusConfig(), TokensConfig(path="here")), weights=(1, 2.5)),
    ],
    ids=lambda config: config.type,
)
def test_what_a_file_holds_is_read_back(config: DataConfig) -> None:
    assert from_plain(File, to_plain(File(data=config))) == File(data=config)


def test_splits_never_meet_and_lose_nothing(folder: str) -> None:
    config = TokensConfig(path=folder, validation_fraction=0.2)
    assert seen(config, "train") == set(range(800))
    assert seen(config, "validation") == set(range(800, 1000))


def test_validation_in_a_folder_of_its_own(folder: str, tmp_path: Path) -> None:
    other = str(write_folder(tmp_path / "other", [50]))
    config = TokensConfig(path=folder, validation_path=other)
    assert seen(config, "train") == set(range(1000))
    assert seen(config, "validation") == set(range(50))


def test_without_validation_training_has_it_all(folder: str) -> None:
    config = TokensConfig(path=folder, validation_fraction=0)
    assert seen(config, "train") == set(range(1000))
    assert not holds_out(config)


def test_too_little_for_validation_says_what_decides_it(folder: str) -> None:
    config = TokensConfig(path=folder, validation_fraction=0.012)
    said = rf"length: got 12, expected less than the 12 tokens of {folder} for validation, validation_fraction 0.012"
    with pytest.raises(ValueError, match=said):
        open_source(config, LENGTH, 0, "validation")


def test_the_choices_arrive(folder: str) -> None:
    config = TokensConfig(path=folder, documents="apart", shuffle=False)
    batch = open_source(config, LENGTH, 0, "train").batch(0, 10)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 12, 24, 36, 48, 60, 72, 84, 93, 94, 96, 108, 120]
    assert batch.ids[0, ::LENGTH].tolist() == list(range(0, 130, 13))


def test_validation_is_the_same_for_every_seed_and_shuffled(folder: str) -> None:
    config = TokensConfig(path=folder, shuffle=False, validation_fraction=0.5)
    one, two = (open_source(config, LENGTH, seed, "validation").batch(0, 9).ids for seed in (1, 2))
    assert one.tolist() == two.tolist()
    assert (one[:, 0].diff() < 0).any()
    trained = [open_source(RecallConfig(), 64, seed, "train").batch(0, 9).ids for seed in (1, 2)]
    assert trained[0].tolist() != trained[1].tolist()


def test_the_standard_library_as_bytes() -> None:
    """Each row is a stretch of the texts of its split, one after the other."""
    for split in ("train", "validation"):
        text = b"".join(document.encode() for document in documents(split))
        source = open_source(CorpusConfig(), 200, 3, split)
        batch = source.batch(10**9, 8)
        assert source.vocab_size == 256
        for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            assert bytes([*ids, targets[-1]]) in text
            assert targets[:-1] == ids[1:]


def test_documents_of_the_standard_library_kept_apart() -> None:
    """What begins a sequence inside a row begins a document."""
    source = open_source(CorpusConfig(documents="apart"), 200, 3, "validation")
    batch = source.batch(0, 1000)
    assert batch.cu_seqlens is not None
    inside = [start for start in batch.cu_seqlens[:-1].tolist() if start % 200]
    assert inside
    openings = {document.encode()[:20] for document in documents("validation")}
    for start in inside:
        assert batch.targets[0, start - 1] == -100
        stretch = bytes(batch.ids[0, start : start + min(20, 200 - start % 200)].tolist())
        assert any(
            opening.startswith(stretch) or stretch.startswith(opening) for opening in openings
        )


def test_a_mixture_of_folders_and_a_corpus(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "bytes", [256]))
    config = MixtureConfig(parts=(TokensConfig(path=folder), CorpusConfig()), weights=(1, 3))
    ids = open_source(config, LENGTH, 0, "train").batch(0, 1024).ids
    assert (ids.diff() == 1).all(1).sum() == 256  # the folder's rows count upward


def test_a_mixture_is_validated_on_parts_that_hold_something_out(tmp_path: Path) -> None:
    first, second = (str(write_folder(tmp_path / name, [256])) for name in "ab")
    nothing = TokensConfig(path=first, validation_fraction=0)
    last = TokensConfig(path=second, validation_fraction=0.25)
    mixed = MixtureConfig(parts=(nothing, last), weights=(1, 3))
    assert holds_out(mixed)
    assert seen(mixed, "validation") == set(range(192, 256))
    assert seen(mixed, "train") == set(range(256))
    assert not holds_out(MixtureConfig(parts=(nothing,), weights=(1,)))


def test_a_task_says_what_guessing_gives() -> None:
    config = ParityConfig()
    source = open_source(config, LENGTH, 0, "validation")
    assert isinstance(source, Task)
    assert config.chance == 0.5
    targets = source.batch(0, 100).targets
    assert torch.allclose(targets.double().mean(), torch.tensor(0.5).double(), atol=0.1)


def test_parts_of_other_vocabularies() -> None:
    config = MixtureConfig(parts=(ParityConfig(), CorpusConfig()), weights=(1, 1))
    with pytest.raises(ValueError, match=r"parts: got \[2, 256\], expected the same vocab_size"):
        open_source(config, LENGTH, 0, "train")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"type": "token"}, "data.type: got 'token', expected one of tokens, python"),
        ({"type": "tokens"}, "data.path: missing, expected a string"),
        ({"type": "tokens", "path": "p", "document": "apart"}, "data.document: unknown name"),
        ({"type": "tokens", "path": "p", "documents": "both"}, "data.documents: got 'both'"),
        (
            {"type": "tokens", "path": "p", "validation_fraction": 1},
            "data.validation_fraction: got 1, expected at least 0 and less than 1",
        ),
        ({"type": "mqar", "pairs": 0}, "data.pairs: got 0"),
        ({"type": "mixture", "parts": [], "weights": []}, "data.parts: got ()"),
        (
            {"type": "mixture", "parts": [{"type": "python"}], "weights": [1, 2]},
            "data.weights: got (1, 2), expected one for each of 1 parts",
        ),
        (
            {"type": "mixture", "parts": [{"type": "python"}], "weights": [0]},
            "data.weights: got (0,), expected finite numbers above 0",
        ),
    ],
)
def test_files_with_mistakes(data: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as mistake:
        from_plain(File, {"data": data})
    assert str(mistake.value).startswith(said)
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    ("length", "seed", "split", "said"),
    [
        (0, 0, "train", "length: got 0"),
        (LENGTH, -1, "train", "seed: got -1"),
        (LENGTH, 2**64, "train", "seed: got 18446744073709551616"),
        (LENGTH, 0, "test", "split: got 'test', expected one of train, validation"),
    ],
)
def test_arguments_with_mistakes(length: int, seed: int, split: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_source(ParityConfig(), length, seed, split)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="documents: got 'both', expected one of 'run_on', 'apart'"
    ):
        CorpusConfig(documents="both")  # type: ignore[arg-type]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"index\.json"):
        open_source(TokensConfig(path=str(tmp_path)), LENGTH, 0, "train")
