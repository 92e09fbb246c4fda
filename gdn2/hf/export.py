"""A training run as a folder that others can use: model, tokenizer, generation config and model card."""

from pathlib import Path

from gdn2.hf.card import model_card
from gdn2.hf.results import read_results
from gdn2.hf.special_tokens import write_special_tokens
from gdn2.models.files import new_folder, read_json, standing
from gdn2.models.folder import load_model, save_model
from gdn2.models.run_folder import CHECKPOINTS, MODEL, Line, read_metrics, step_of, step_of_model
from gdn2.ops.arguments import require

CARD = "README.md"


def find_model(run: str | Path, step: int | None = None) -> Path:
    """The model folder of a run: that after a step, of which a checkpoint was kept, or the latest."""
    run = Path(run)
    kept = {n: path for path in run.glob(f"{CHECKPOINTS}/*") if (n := step_of(path)) is not None}
    if step is not None:
        known = ", ".join(map(str, sorted(kept))) or "none"
        require(step in kept, "step", step, f"a step whose checkpoint was kept: {known}")
        return kept[step] / MODEL
    finished = standing(run / MODEL)
    if finished.is_dir():
        return finished
    require(bool(kept), "run", f"{run} with neither model nor checkpoints", "a training run")
    return kept[max(kept)] / MODEL


def export_run(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    results: str | Path | None = None,
) -> None:
    """Write the folder, whole or not at all.

    Args:
        run: the folder of a training run.
        folder: where to write to; there must be nothing yet.
        step: of a checkpoint that was kept; by default the latest model.
        bos_id: the token that opens a text.
        eos_id: the token that ends one.
        results: of `gdn2 eval` or of lm-eval, as JSON.
    """
    run, folder = Path(run), Path(folder).absolute()
    require(not standing(folder).exists(), "folder", f"{folder}, which exists", "a new one")
    source = find_model(run, step)
    model = load_model(source)
    metrics = _metrics_at(run, step_of_model(source.absolute()))
    numbers = {}
    if results is not None:
        numbers = read_results(Path(results), source, model.config.digest, metrics.get("step"))
    card = model_card(folder.name, model.config, read_json(run / "config.json"), metrics, numbers)
    has_tokenizer = any(source.glob("tokenizer.*"))
    with new_folder(folder) as written:
        save_model(model, written, tokenizer=source if has_tokenizer else None)
        write_special_tokens(written, bos_id, eos_id)
        (written / CARD).write_text(card)


def _metrics_at(run: Path, step: int | None) -> Line:
    """The newest value of each metric up to a step."""
    newest: Line = {}
    for line in read_metrics(run):
        if step is None or line["step"] <= step:
            newest |= line
    return newest
