"""`gdn2 generate`: a model and a tokenizer joined, text printed as it comes, and how fast it came."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer

from gdn2.bench.timing import DTYPES, find_device, find_dtype, synchronize
from gdn2.data.byte_tokenizer import BYTES
from gdn2.data.tokenizers import load_tokenizer
from gdn2.layers.joint import lay_side_by_side
from gdn2.models.decode import Steps
from gdn2.models.files import standing
from gdn2.models.folder import load_stop_ids, open_model
from gdn2.models.generate import Stop, go_on
from gdn2.models.prefill import prefill
from gdn2.models.sampling import Sampling
from gdn2.ops.arguments import require


@dataclass(frozen=True)
class Report:
    """A text's continuation, and the seconds it took."""

    text: str
    tokens: list[int]
    end: str
    prompt_tokens: int
    prefill_seconds: float
    # From the second token to the last, since the first step may capture a graph.
    decode_seconds: float
    eager_because: str | None  # why no CUDA graph decoded

    @property
    def prefill_speed(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_speed(self) -> float | None:
        steps = len(self.tokens) - 2
        return steps / self.decode_seconds if steps > 0 else None

    def in_words(self) -> str:
        """One line, with the end's reason and both speeds."""
        decoding = "" if self.decode_speed is None else f" at {self.decode_speed:,.1f} tokens/s"
        how = "CUDA graph" if self.eager_because is None else f"eager: {self.eager_because}"
        return (
            f"[{self.end} after {len(self.tokens)} tokens{decoding} ({how}); "
            f"prompt of {self.prompt_tokens} at {self.prefill_speed:,.1f} tokens/s]"
        )

    def as_json(self) -> dict[str, Any]:
        speeds = {"prefill_speed": self.prefill_speed, "decode_speed": self.decode_speed}
        return {**asdict(self), **speeds}


class Talk:
    """A model that speaks."""

    def __init__(
        self, name: str, tokenizer: str | None, device: str | None, dtype: str | None
    ) -> None:
        where = find_device(device)
        folder = standing(Path(name))
        self.model = open_model(name, device=where, dtype=DTYPES[find_dtype(dtype, where)])
        if not folder.is_dir():
            typer.echo(f"{name} is a preset: its weights are random, and so is the text", err=True)
        own = str(folder) if folder.is_dir() else BYTES
        self.tokenizer = load_tokenizer(tokenizer or own)
        found, known = self.tokenizer.vocab_size, self.model.config.vocab_size
        require(found <= known, "tokenizer", f"{found} tokens", f"at most the model's {known}")
        self.stop_ids = load_stop_ids(folder)
        lay_side_by_side(self.model)

    def go_on(self, prompt: str, sampling: Sampling, stop: Stop, seed: int) -> Report:
        """Print what follows the prompt."""
        _check_text(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise ValueError(f"text: got {prompt!r}, expected at least one token")
        model, steps = self.model, Steps(self.model)
        device = model.embedding.weight.device
        started = time.perf_counter()
        ready = prefill(model, [ids])
        synchronize(device)
        prefilled = time.perf_counter()
        events = go_on(
            model,
            ready,
            [torch.tensor(ids)],
            sampling=sampling,
            stop=replace(stop, ids=self.stop_ids),
            seed=seed,
            decode=self.tokenizer.decode,
            steps=steps,
        )
        tokens, pieces, moments, end = [], [], [], ""
        for event in events:
            moments.append(time.perf_counter())
            tokens.append(event.token)
            pieces.append(event.text)
            end = event.end or ""
            typer.echo(event.text, nl=False)
        typer.echo()
        spent = prefilled - started, moments[-1] - moments[:2][-1]
        return Report("".join(pieces), tokens, end, len(ids), *spent, steps.eager_because)


def _check_text(prompt: str) -> None:
    """Refuse bytes that are no text: Python hides them in arguments as surrogates, which no tokenizer takes."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError(f"text: got {prompt!r}, expected UTF-8") from None
