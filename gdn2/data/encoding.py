"""Texts to tokens on several processes, in order."""

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import TypeVar

import numpy as np

from gdn2.data.tokenizers import Tokenizer

STRETCH = 2**18  # characters that are encoded at once
BATCH = 2**18  # characters that are sent to a process together
AHEAD = 4  # batches per process that are read before their turn

M = TypeVar("M")
_tokenizer: Tokenizer  # of a worker process


def encode_in_order(
    texts: Iterable[tuple[str, M]], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[np.ndarray, M]]:
    """The tokens of texts, each with the mark that came with it, in the order of the texts.

    A long text is cut into stretches, so that one book keeps every process busy and no process is filled by it.
    """
    cut = stretches(texts, drops_spaces(tokenizer))
    parts: list[np.ndarray] = []
    for ids, mark in _encode_stretches(_batches(cut), tokenizer, workers):
        parts.append(ids)
        if mark is not None:
            yield np.concatenate(parts), mark
            parts = []


def drops_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the second of two words is encoded without the space before it, as SentencePiece does."""
    both, first, second = tokenizer.encode_texts(["a b", "a", "b"])
    return np.array_equal(both, np.concatenate([first, second]))


def stretches(
    texts: Iterable[tuple[str, M]], drop_spaces: bool, size: int = STRETCH
) -> Iterator[tuple[str, M | None]]:
    """Texts cut before words, where tokens end; the last stretch of a text bears its mark."""
    for text, mark in texts:
        start = 0
        while (end := _space(text, start, size)) is not None:
            yield text[start:end], None
            start = end + drop_spaces
        yield text[start:], mark


def _space(text: str, start: int, size: int) -> int | None:
    """The first single space that is `size` characters on: what comes after it is a word, which starts a token."""
    place = text.find(" ", start + size)
    while 0 <= place < len(text) - 1:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place
        place = text.find(" ", place + 1)
    return None


def _batches(cut: Iterable[tuple[str, M | None]]) -> Iterator[list[tuple[str, M | None]]]:
    batch, length = [], 0
    for stretch in cut:
        batch.append(stretch)
        length += len(stretch[0])
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    yield batch


def _encode_stretches(
    batches: Iterator[list[tuple[str, M | None]]], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[np.ndarray, M | None]]:
    if workers == 1:
        for batch in batches:
            yield from _joined(batch, tokenizer.encode_texts([text for text, _ in batch]))
        return
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start_worker, initargs=(tokenizer,)
    )
    try:
        yield from _encode_ahead(pool, batches, AHEAD * workers)
    except BrokenProcessPool:
        raise ValueError("workers: one was killed, for lack of memory perhaps") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_ahead(
    pool: ProcessPoolExecutor, batches: Iterator[list[tuple[str, M | None]]], most: int
) -> Iterator[tuple[np.ndarray, M | None]]:
    waiting: deque[tuple[list[tuple[str, M | None]], Future[list[np.ndarray]]]] = deque()
    for batch in batches:
        with _uninterrupted():
            future = pool.submit(_encode, [text for text, _ in batch])
        waiting.append((batch, future))
        while len(waiting) > most or (waiting and waiting[0][1].done()):
            first, future = waiting.popleft()
            yield from _joined(first, future.result())
    for batch, future in waiting:
        yield from _joined(batch, future.result())


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started inside never hear of Ctrl-C, not even while they import: it is the parent's to answer."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _joined(
    batch: list[tuple[str, M | None]], encoded: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, M | None]]:
    for (_, mark), ids in zip(batch, encoded, strict=True):
        yield ids, mark


def _start_worker(tokenizer: Tokenizer) -> None:
    global _tokenizer  # noqa: PLW0603 (a process of a pool has no other place for what it keeps)
    _tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave when the parent is gone, which a pool's processes would not notice after a kill."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(texts: list[str]) -> list[np.ndarray]:
    return _tokenizer.encode_texts(texts)
