"""Batches made ahead of time by a thread, so that training never waits for them."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from gdn2.data.batch import Batch, Source
from gdn2.data.checks import require_integer


class Prefetch:
    """Batches of `rows` rows that begin at each of `firsts`, in this order; use it in a `with`, or close it.

    A mistake while a batch is made is raised where that batch is asked for.
    """

    def __init__(
        self,
        source: Source,
        firsts: Iterable[int],
        rows: int,
        *,
        ahead: int = 4,
        pin: bool = False,
    ) -> None:
        require_integer("ahead", ahead, 1)
        self._source, self._rows, self._pin, self._ahead = source, rows, pin, ahead
        self._firsts = iter(firsts)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._pending: deque[Future[Batch]] = deque()
        self._fill()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Batch:
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft()
        self._fill()
        return batch.result()

    def close(self) -> None:
        """End the thread; batches not asked for are dropped."""
        self._pending.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        for first in islice(self._firsts, self._ahead - len(self._pending)):
            self._pending.append(self._thread.submit(self._make, first))

    def _make(self, first: int) -> Batch:
        batch = self._source.batch(first, self._rows)
        if not self._pin:
            return batch
        starts = None if batch.cu_seqlens is None else batch.cu_seqlens.pin_memory()
        return Batch(batch.ids.pin_memory(), batch.targets.pin_memory(), starts)
