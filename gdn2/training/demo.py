"""A small model from nothing in two minutes: trained, interrupted, resumed, drawn, and asked to write."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from gdn2.data.tokenizers import load_tokenizer
from gdn2.models.folder import load_model
from gdn2.models.run_folder import MODEL
from gdn2.training.loop import RunEnd, train
from gdn2.training.plot import plot_runs
from gdn2.training.run_file import load_config
from gdn2.training.writing import sample

INTERRUPTED_AT = 0.8  # of the run

NEXT = """
What to try next
  gdn2 generate {folder}/model "class " --temperature 0.8
  gdn2 train demo run.dir=runs/wider model.hidden_size=192 schedule.tokens=2_000_000
  gdn2 train demo run.dir=runs/kda model.preset=kda-1m-hybrid
  gdn2 plot {folder} runs/kda --out compared.png
  gdn2 prepare --help        your own text
  docs/training.md           from raw text to many GPUs"""


def demo(folder: Path, say: Callable[[str], None]) -> RunEnd:
    """Train the demo in a folder, resume it once, and show what came of it."""
    config = load_config("demo", [])
    config = replace(config, run=replace(config.run, dir=str(folder)))
    say(
        f"1. Train a hybrid Gated DeltaNet-2 on the source of Python's standard library, in {folder}"
    )
    end = train(config, until=int(config.steps * INTERRUPTED_AT))
    if end.stopped_by is not None:
        return end
    if not end.is_finished:
        say(f"2. Interrupted on purpose after step {end.step}; the same command goes on from there")
        end = train(config)
        if end.stopped_by is not None:
            return end
    say(f"3. {_outcome(end)}")
    if find_spec("matplotlib") is None:
        say('4. For a picture: pip install "gdn2[plot]", then gdn2 plot ' + str(folder))
    else:
        picture = folder / "curves.png"
        plot_runs([folder], picture)
        say(f"4. Loss, speed and gradient norm: {picture}")
    model, tokenizer = load_model(folder / MODEL), load_tokenizer(folder / MODEL)
    say(f"5. It writes:\n\n{sample(model, tokenizer, config.samples)}")
    say(NEXT.format(folder=folder))
    return end


def _outcome(end: RunEnd) -> str:
    loss = end.validation.get("validation_loss")
    if loss is None:
        return f"This run was finished before; delete {end.folder} to train it again"
    return f"Validation loss {loss:.3f} nats a byte; a table of how often each byte occurs has about 3.2"
