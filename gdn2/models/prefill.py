"""Prompts into a state, in calls of bounded size."""

from collections.abc import Sequence, Sized
from typing import NamedTuple

import torch
from torch import Tensor

from gdn2.layers.layout import Layout
from gdn2.models.language_model import LanguageModel
from gdn2.models.state import ModelState
from gdn2.ops.arguments import require

# Tokens of all rows in one call; a GPU has more memory, and calls to start.
CHUNKS = {"cpu": 4096, "cuda": 16384}
Prompts = Sequence[Sequence[int] | Tensor] | Tensor


class Prefilled(NamedTuple):
    """Where decoding begins."""

    logits: Tensor  # [rows, vocabulary] after the last token of each row
    state: ModelState

    def fork(self, copies: int) -> "Prefilled":
        """The same with each row `copies` times."""
        return Prefilled(self.logits.repeat_interleave(copies, 0), self.state.fork(copies))


def read_prompts(prompts: Prompts, vocabulary: int) -> list[Tensor]:
    """Each prompt as a tensor [length] on the CPU, checked."""
    listed = isinstance(prompts, Sized) and not isinstance(prompts, str)
    require(listed, "prompts", repr(prompts), "a list of token ids for each")
    require(len(prompts) > 0, "prompts", "none", "at least one")
    rows = [_read_prompt(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
    for i, row in enumerate(rows):
        name = f"prompts[{i}]"
        require(row.ndim == 1, name, ("shape", row), "[length]")
        require(len(row) > 0, name, "no tokens", "at least one")
        integers = row.dtype in (torch.int32, torch.int64)
        require(integers, name, row.dtype, "integers")
        for token in (int(row.min()), int(row.max())):
            require(0 <= token < vocabulary, name, f"token {token}", f"0 to {vocabulary - 1}")
    return [row.long() for row in rows]


def _read_prompt(name: str, prompt: Sequence[int] | Tensor) -> Tensor:
    try:
        return torch.as_tensor(prompt).cpu()
    except (TypeError, ValueError, RuntimeError):  # no numbers, or too large ones
        raise ValueError(f"{name}: got {prompt!r}, expected token ids") from None


@torch.no_grad()
def prefill(
    model: LanguageModel,
    prompts: Prompts,
    state: ModelState | None = None,
    *,
    chunk: int | None = None,
) -> Prefilled:
    """Logits and state after each prompt, which go on from `state` where there is one.

    Rows may differ in length. A call holds at most `chunk` tokens, or one of each row where these are more, so that
    memory does not grow with the prompts.
    """
    rows = read_prompts(prompts, model.config.vocab_size)
    if chunk is None:
        chunk = CHUNKS.get(model.embedding.weight.device.type, CHUNKS["cpu"])
    require(chunk >= 1, "chunk", chunk, "at least 1")
    state = model.new_state(len(rows)) if state is None else state
    require(state.rows == len(rows), "state.rows", state.rows, f"{len(rows)}, one per prompt")
    device, columns = state.seen.device, max(1, chunk // len(rows))
    logits: Tensor | None = None
    for start in range(0, max(map(len, rows)), columns):
        pieces = [row[start : start + columns] for row in rows]
        ids, layout = _laid_out(pieces, device)
        found, after = model.next_token_logits(ids, state, layout)
        assert after is not None
        here = torch.tensor([[len(piece) > 0] for piece in pieces], device=device)
        logits, state = found if logits is None else torch.where(here, found, logits), after
    assert logits is not None
    return Prefilled(logits, state)


def _laid_out(pieces: list[Tensor], device: torch.device) -> tuple[Tensor, Layout]:
    lengths = [len(piece) for piece in pieces]
    if len(set(lengths)) == 1:
        return torch.stack(pieces).to(device), Layout.dense(len(pieces), lengths[0])
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device)
    return torch.cat(pieces).unsqueeze(0).to(device), Layout.packed(ends, sum(lengths))
