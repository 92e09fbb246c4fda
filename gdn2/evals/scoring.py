"""A model's answers to requests; neither lm-eval nor the tasks' data are needed."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from gdn2.data.tokenizers import Tokenizer
from gdn2.evals.encoding import check_vocabulary, encode_context, encode_pair, rolling_pairs
from gdn2.evals.likelihood import Pair, log_likelihoods
from gdn2.evals.prefixes import Batching, Tokens, prefill_all
from gdn2.evals.request import Request
from gdn2.evals.requests_file import WINDOW
from gdn2.layers.joint import lay_side_by_side
from gdn2.models.decode import Steps
from gdn2.models.generate import Stop, collect, go_on
from gdn2.models.language_model import LanguageModel
from gdn2.models.prefill import Prefilled
from gdn2.models.sampling import GREEDY
from gdn2.models.state import ModelState

Answer: TypeAlias = "str | float | list[float | bool]"  # text, a logarithm, or one and `is_greedy`
Answers: TypeAlias = Callable[[Sequence[Request]], Sequence[Answer]]  # whoever answers, in order
Numbered: TypeAlias = Iterator[tuple[int, Answer]]


class Scorer:
    """Answers requests in batches, in an order of its own."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        batch_size: int | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Take `batch_size` rows at once, or as many as fit; generation ends at `stop_ids` or where a document does."""
        check_vocabulary(tokenizer, model.config)
        lay_side_by_side(model)
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        ends = {tokenizer.eos_id, *stop_ids}
        self._stop_ids = tuple(sorted(token for token in ends if token is not None))
        self._steps = Steps(model)

    def answers(self, requests: Sequence[Request]) -> Numbered:
        """The number of each request with its answer, as they are found."""
        ways = {
            "loglikelihood": self._loglikelihood,
            "rolling": self._rolling,
            "generate": self._generate,
        }
        for kind, answer in ways.items():
            numbers = [i for i, request in enumerate(requests) if request.kind == kind]
            for i, found in answer([requests[number] for number in numbers]):
                yield numbers[i], found

    def _loglikelihood(self, requests: Sequence[Request]) -> Numbered:
        pairs = [encode_pair(self.tokenizer, r.context, r.continuation) for r in requests]
        for i, (log, is_greedy) in log_likelihoods(self.model, pairs, self.batch_size):
            yield i, [log, is_greedy]

    def _rolling(self, requests: Sequence[Request]) -> Numbered:
        pairs: list[Pair] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            window = request.metadata[WINDOW]
            assert window is None or isinstance(window, int)
            windows = rolling_pairs(self.tokenizer, request.context, window)
            if not windows:
                yield i, 0.0
            pairs += windows
            owners += [i] * len(windows)
        left, sums = Counter(owners), [0.0] * len(requests)
        for number, (log, _) in log_likelihoods(self.model, pairs, self.batch_size):
            i = owners[number]
            sums[i] += log
            left[i] -= 1
            if left[i] == 0:
                yield i, sums[i]

    def _generate(self, requests: Sequence[Request]) -> Numbered:
        alike: dict[Stop, dict[Tokens, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, request in enumerate(requests):
            stop = Stop(max_tokens=request.max_tokens, ids=self._stop_ids, strings=request.until)
            alike[stop][encode_context(self.tokenizer, request.context)].append(i)
        for stop, by_prompt in alike.items():
            prompts = list(by_prompt)
            for n, text in self._continued(prompts, stop):
                yield from ((i, text) for i in by_prompt[prompts[n]])

    def _continued(self, prompts: Sequence[Tokens], stop: Stop) -> Iterator[tuple[int, str]]:
        """Many prompts are decoded together, however few of them are read in one call."""
        longest = max(map(len, prompts)) + stop.max_tokens
        batching = Batching.of(self.model, longest, self.batch_size)
        waiting: list[tuple[list[int], Prefilled]] = []
        for numbers, ready in prefill_all(self.model, prompts, batching):
            if waiting and sum(len(n) for n, _ in waiting) + len(numbers) > batching.rows:
                yield from self._decoded(waiting, stop)
                waiting = []
            waiting.append((numbers, ready))
        yield from self._decoded(waiting, stop)

    def _decoded(
        self, waiting: Sequence[tuple[list[int], Prefilled]], stop: Stop
    ) -> Iterator[tuple[int, str]]:
        logits = torch.cat([ready.logits for _, ready in waiting])
        state = ModelState.join([ready.state for _, ready in waiting])
        events = go_on(
            self.model,
            Prefilled(logits, state),
            sampling=GREEDY,
            stop=stop,
            decode=self.tokenizer.decode,
            steps=self._steps,
        )
        numbers = [number for some, _ in waiting for number in some]
        done = collect(events, len(numbers))
        return zip(numbers, (completion.text for completion in done), strict=True)
