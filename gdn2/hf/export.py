"""A training run as a folder that others can use: model, tokenizer, generation config and model card."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdn2.hf.card import model_card
from gdn2.models.files import read_json
from gdn2.models.folder import load_model, save_model
from gdn2.ops.arguments import require

CARD = "README.md"


def find_model(run: str | Path, step: int | None = None) -> Path:
    """The model folder of a run: that after a step, of which a checkpoint was kept, or the latest."""
    run = Path(run)
    found = {int(path.name.partition("-")[2]): path for path in run.glob("checkpoints/step-*")}
    if step is not None:
        known = ", ".join(map(str, sorted(found))) or "none"
        require(step in found, "step", step, f"a step whose checkpoint was kept: {known}")
        return found[step] / "model"
    if (run / "model").is_dir():
        return run / "model"
    require(bool(found), "run", f"{run} with neither model nor checkpoints", "a training run")
    return found[max(found)] / "model"


def export_run(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    stop_ids: Iterable[int] = (),
    results: str | Path | None = None,
) -> None:
    """Write the folder.

    Args:
        run: the folder of a training run.
        folder: where to write to; there must be nothing yet.
        step: of a checkpoint that was kept; by default the latest model.
        stop_ids: tokens that end a text.
        results: a JSON file with numbers for each task, such as lm-eval writes.
    """
    run, folder = Path(run), Path(folder)
    require(not folder.exists(), "folder", f"{folder}, which exists", "a new one")
    source = find_model(run, step)
    numbers = {} if results is None else _read_results(Path(results))
    metrics = _metrics_at(run, step)
    has_tokenizer = any(source.glob("tokenizer*"))
    model = load_model(source)
    save_model(model, folder, tokenizer=source if has_tokenizer else None, stop_ids=stop_ids)
    card = model_card(folder.name, model.config, read_json(run / "config.json"), metrics, numbers)
    (folder / CARD).write_text(card)


def _read_results(file: Path) -> dict[str, dict[str, Any]]:
    data = read_json(file)
    tasks = data.get("results", data)
    fits = isinstance(tasks, dict) and all(isinstance(task, dict) for task in tasks.values())
    require(fits, f"{file}", "something else", "a table of numbers for each task")
    # lm-eval writes each task's name again, as its alias.
    return {task: {k: v for k, v in row.items() if k != "alias"} for task, row in tasks.items()}


def _metrics_at(run: Path, step: int | None) -> dict[str, Any]:
    """The newest value of each metric up to a step."""
    newest: dict[str, Any] = {}
    file = run / "metrics.jsonl"
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # cut short by a kill
            break
        if step is None or line["step"] <= step:
            newest |= line
    return newest
