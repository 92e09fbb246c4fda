"""A small model in a folder, rows to ask it about, and both as an evaluation takes them."""

from pathlib import Path
from typing import Any

import torch

from gdn2.evals.run import Subject
from gdn2.evals.suites import Sources
from gdn2.layers.config import DeltaConfig
from gdn2.models.config import ModelConfig
from gdn2.models.folder import save_model
from gdn2.models.language_model import LanguageModel
from tests.data.samples import save_json
from tests.evals.cases import write_rows
from tests.evals.rows import write_folder

MODEL = "run/checkpoints/step-00000120/model"
KEYED = [
    {"text": f"A film. Year: 199{i}. By Ada.", "key": "Year", "value": f"199{i}"} for i in range(3)
]


def write_model(folder: Path) -> Path:
    """A model of one layer, in a folder, whose tokenizer lies beside it too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_json(folder.parent / "tokenizer.json")
    model = LanguageModel(
        ModelConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            cell=(DeltaConfig(num_heads=1, key_head_dim=8, value_head_dim=8),),
            vocab_size=400,
        )
    )
    save_model(model, folder, tokenizer=folder.parent / "tokenizer.json")
    return folder


def furnish(place: Path) -> Path:
    """Put a model in a run's folder there, its tokenizer, and data."""
    save_json(place / "tokenizer.json")
    write_model(place / MODEL)
    write_rows(write_folder(place / "data") / "swde.jsonl", KEYED)
    return place


def subject(place: Path, name: str = MODEL, **others: Any) -> Subject:
    return Subject(
        name=str(place / name), device=torch.device("cpu"), dtype=torch.float32, **others
    )


def sources(place: Path, **others: Any) -> Sources:
    return Sources(data=place / "data", window=16, **others)
