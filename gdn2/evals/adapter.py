"""Our models as lm-eval sees them; importing this needs lm-eval."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gdn2.data.extras import need
from gdn2.data.tokenizers import load_tokenizer
from gdn2.evals.request import Request
from gdn2.evals.requests_file import WINDOW
from gdn2.evals.scoring import Answer, Answers, Scorer
from gdn2.layers.plain import nearest
from gdn2.models.folder import load_stop_ids, open_model
from gdn2.ops.arguments import require

LM: Any = need("lm_eval.api.model", "eval", "lm-eval's tasks").LM
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # its names
PRECISIONS = ("float64", "float32", "bfloat16", "float16")  # likewise
OPTIONS = ("pretrained", "tokenizer", "window", "carry_state", "dtype")
MAX_TOKENS = 256  # that lm-eval's own models generate where a task does not say


class RequestLM(LM):  # type: ignore[misc]
    """Turns lm-eval's instances into requests and gives back what some function answers."""

    def __init__(self, answer: Answers, window: int | None) -> None:
        """Read texts in windows of so many tokens for their perplexity; without one the state is carried through."""
        super().__init__()
        self._answer, self._window = answer, window

    def loglikelihood(self, instances: Sequence[Any]) -> list[tuple[float, bool]]:
        asked = [
            Request(task, number, "loglikelihood", *instance.args)
            for task, number, instance in _numbered(instances)
        ]
        return [(answer[0], answer[1]) for answer in self._answer(asked)]  # type: ignore[index,misc]

    def loglikelihood_rolling(self, instances: Sequence[Any]) -> list[float]:
        asked = [
            Request(task, number, "rolling", instance.args[0], metadata={WINDOW: self._window})
            for task, number, instance in _numbered(instances)
        ]
        return list(self._answer(asked))  # type: ignore[arg-type]

    def generate_until(self, instances: Sequence[Any]) -> list[str]:
        asked = [
            _generation(task, number, *instance.args)
            for task, number, instance in _numbered(instances)
        ]
        return list(self._answer(asked))  # type: ignore[arg-type]


class Gdn2LM(RequestLM):
    """The model `gdn2` of lm-eval's command line."""

    def __init__(
        self,
        pretrained: str = "",
        tokenizer: str | None = None,
        window: int = 4096,
        carry_state: bool = False,
        dtype: str = "float32",
        batch_size: str | int = "auto",
        device: str | None = None,
        max_batch_size: int | None = None,
        **others: object,
    ) -> None:
        """Open a model's folder; `window` and `carry_state` are as for `RequestLM`."""
        for name in others:
            require(False, "model_args", repr(name), nearest(name, OPTIONS))
        require(bool(pretrained), "model_args", "no pretrained", "pretrained=FOLDER")
        require(dtype in PRECISIONS, "dtype", repr(dtype), f"one of {', '.join(PRECISIONS)}")
        fits = type(window) is int and window >= 1
        require(fits, "window", repr(window), "an integer of at least 1")
        require(type(carry_state) is bool, "carry_state", repr(carry_state), "true or false")
        where = device or "cuda"
        if where.startswith("cuda") and not torch.cuda.is_available():
            where = "cpu"  # lm-eval's command line asks for cuda:0 where nothing was said
        model = open_model(pretrained, device=where, dtype=getattr(torch, dtype))
        self._scorer = Scorer(
            model,
            load_tokenizer(tokenizer or pretrained),
            batch_size=None if str(batch_size).startswith("auto") else int(batch_size),
            stop_ids=load_stop_ids(Path(pretrained)),
        )
        super().__init__(self._scored, None if carry_state else window)

    def _scored(self, requests: Sequence[Request]) -> list[Answer]:
        found = dict(self._scorer.answers(requests))
        return [found[i] for i in range(len(requests))]


def _numbered(instances: Sequence[Any]) -> list[tuple[str, int, Any]]:
    """Each instance with the name of its task and its number there."""
    seen: Counter[str] = Counter()
    rows = []
    for instance in instances:
        name = instance.task_name or ""
        rows.append((name, seen[name], instance))
        seen[name] += 1
    return rows


def _generation(task: str, number: int, context: str, options: dict[str, Any]) -> Request:
    warm = options.get("temperature", 1.0 if options.get("do_sample") else 0.0) > 0
    if options.get("do_sample", warm) and warm:
        raise ValueError(f"{task}: got do_sample, expected greedy generation")
    until = options.get("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    most = next((options[name] for name in LIMITS if options.get(name)), MAX_TOKENS)
    return Request(task, number, "generate", context, until=until, max_tokens=most)
