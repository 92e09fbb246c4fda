"""What an evaluation leaves: whose numbers they are, what made them, and the numbers."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gdn2 import __version__
from gdn2.data.tokenizers import Tokenizer
from gdn2.evals.answers import AnswerFile
from gdn2.evals.encoding import check_vocabulary, first_token
from gdn2.models.config import ModelConfig
from gdn2.models.files import read_json, standing
from gdn2.models.folder import CONFIG, config_of, load_stop_ids
from gdn2.models.presets import preset_names
from gdn2.models.run_folder import step_of_model
from gdn2.models.weights import checksum
from gdn2.ops.versions import installed

FORMAT = "gdn2 results 1"
WEIGHTS, RANDOM = "model*.safetensors", "random"
LIBRARIES = ("torch", "triton", "tokenizers", "lm_eval", "datasets", "nltk", "wonderwords")


def describe(
    name: str, config: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype
) -> dict[str, Any]:
    """What tells the answers of one model from those of another; reads no weights into memory."""
    folder = standing(Path(name))
    own = folder.is_dir()
    check_vocabulary(tokenizer, config)
    return {
        "config": config.digest,
        "weights": checksum(folder) if own else RANDOM,
        "step": step_of_model(folder.absolute()) if own else 0,
        "dtype": str(dtype).removeprefix("torch."),
        "tokenizer": known_as(tokenizer),
        "first_token": first_token(tokenizer),
        "stops": sorted(load_stop_ids(folder)),
    }


def known_of(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """As much of what `describe` says as can be told of a model that was not asked itself.

    Its folder may lack weights, or be elsewhere. Precision and training step are left out: another device has another
    precision, a copied folder no run beside it.
    """
    folder = standing(Path(name))
    known: dict[str, Any] = {"tokenizer": known_as(tokenizer)}
    if folder.is_dir():
        if (folder / CONFIG).is_file():
            known["config"] = config_of(name).digest
        if any(folder.glob(WEIGHTS)):
            known["weights"] = checksum(folder)
    elif name in preset_names():
        known |= {"config": config_of(name).digest, "weights": RANDOM}
    return known


def known_as(tokenizer: Tokenizer) -> str:
    """What tells a tokenizer from others: the checksum of its file, or the name of one that has none."""
    return tokenizer.sha256 or tokenizer.name


def libraries() -> dict[str, str]:
    """Versions of what takes part and is installed."""
    known = {"gdn2": __version__} | {name: installed(name) for name in LIBRARIES}
    return {name: version for name, version in known.items() if version is not None}


def check_owner(path: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """The results in a file, none where there is none; those of another model are refused."""
    older = read_json(path) if path.exists() else {}
    if older and older.get("model") != model:
        expected = "none or this model's; choose another folder for it"
        raise ValueError(f"{path}: got results of another model, expected {expected}")
    return older


class Results:
    """A file of results, written anew after each task; other tasks' earlier results of the same model are kept."""

    def __init__(self, path: Path, answers: AnswerFile, name: str) -> None:
        """Open the file of whose answers these are, by the name it was given."""
        self.path = path
        model = dict(answers.model)
        older = check_owner(path, model)
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "name": name,
            "model": model,
            "config": answers.config,
            "libraries": libraries(),
            "tasks": older.get("tasks", {}),
            "skipped": {},
            "failed": {},
            "columns": {},
        }

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Keep one task's results."""
        moment = datetime.now(UTC).isoformat(timespec="seconds")
        self.record["tasks"][name] = {**result, "finished": moment}

    def drop(self, name: str, why: str, reason: str) -> None:
        """Say why a task has no results; earlier ones would pass for those of this call."""
        self.record["tasks"].pop(name, None)
        self.record[why][name] = reason

    def write(self) -> None:
        """Replace the file, whole."""
        written = self.path.with_name(f".{self.path.name}")
        written.write_text(json.dumps(self.record, indent=1) + "\n")
        written.replace(self.path)
