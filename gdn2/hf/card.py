"""A model card: what a model is, how it was trained and what it reached, filled in from the files of its run."""

from collections.abc import Iterable, Mapping
from typing import Any

from gdn2.models.config import ModelConfig
from gdn2.models.summary import summarise

HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- gdn2
- linear-attention
---

# {title}

A language model of {parameters:,} parameters, trained with gdn2.

```python
import gdn2.hf  # registers the model; pip install "gdn2[hf]"
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{title}")
```
"""
LAST_LINE = {
    "step": "steps",
    "tokens": "tokens",
    "loss": "training loss",
    "validation_loss": "validation loss",
    "validation_accuracy": "validation accuracy",
}
RECIPE = ("data", "batch", "optimiser", "schedule", "precision")


def model_card(
    title: str,
    config: ModelConfig,
    run: Mapping[str, Any],
    metrics: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
) -> str:
    """The card as Markdown.

    Args:
        title: what the folder is called.
        config: the model's.
        run: the tables of the run's config.
        metrics: those after the step that was exported.
        results: numbers by name, for each task that was evaluated.
    """
    summary = summarise(config)
    sections = [
        HEAD.format(title=title, parameters=summary.parameters),
        _section("Model", _model_rows(config)),
        _section(
            "Training", ((LAST_LINE[name], metrics[name]) for name in LAST_LINE if name in metrics)
        ),
        _section("Recipe", _recipe_rows(run)),
        _section("Evaluation", (row for task in results for row in _leaves(results[task], task))),
    ]
    return "\n".join(filter(None, sections))


def _model_rows(config: ModelConfig) -> Iterable[tuple[str, Any]]:
    yield "width", config.hidden_size
    yield "blocks", config.num_hidden_layers
    yield "MLP", config.intermediate_size
    yield "vocabulary", config.vocab_size
    for i, mixer in enumerate(config.to_dict()["cell"]):
        said = (f"{name} {value}" for name, value in mixer.items() if value is not None)
        yield f"mixer {i + 1} of the cell", ", ".join(said)


def _recipe_rows(run: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    seed = run["run"].get("seed") if isinstance(run.get("run"), Mapping) else None
    yield "seed", "unknown" if seed is None else str(seed)
    for name in RECIPE:
        yield from _leaves(run.get(name), name)


def _section(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *lines, ""]) if lines else ""


def _cell(value: Any) -> str:
    match value:
        case bool() | None:
            text = {True: "yes", False: "no", None: "none"}[value]
        case int():
            text = f"{value:,}"
        case float():
            text = f"{value:.5g}"
        case _:
            text = str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _leaves(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    """Values with their dotted names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}")
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for i, inner in enumerate(value, 1):
            yield from _leaves(inner, f"{path}.{i}")
    elif value is not None:
        yield path, value
