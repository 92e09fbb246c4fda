"""From text to a folder of token shards, on several processes, and again from where it was interrupted.

The text has one order, and a shard ends with the document that fills it. So shards are the same however many processes
encode, and each finished one, with the place after it, is where an interrupted preparation goes on.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdn2.data.byte_tokenizer import BYTES
from gdn2.data.encoding import encode_in_order
from gdn2.data.parts import Part
from gdn2.data.preparation import Record, is_finished, own_folder
from gdn2.data.shard_writer import ShardWriter
from gdn2.data.shards import FORMAT, TokenFolder, dtype_for
from gdn2.data.sources import Place, open_parts, read_documents
from gdn2.data.tokenizers import Tokenizer, load_tokenizer

AUTO, NONE = "auto", "none"
SHARD_TOKENS = 2**26


class Progress(NamedTuple):
    """How far a preparation is."""

    read: int  # bytes, of `size`, which is 0 where nobody knows
    size: int
    documents: int
    tokens: int
    skipped: int


def prepare(
    inputs: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = BYTES,
    bos: str = AUTO,
    eos: str = NONE,
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    skip_bad: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Write the tokens of inputs to the folder `out`; what an interrupted call has finished is kept.

    Args:
        inputs: files, folders, "hf://name" and "python", as `open_parts` reads them.
        out: a new folder, or that of an earlier call with the same settings.
        tokenizer: as `load_tokenizer` takes it; its files are copied to the folder.
        bos: the token before each document: "auto" for the tokenizer's own where it has one, "none", or its name.
        eos: the token after each document, likewise.
        field: where JSON lines, parquet files and datasets hold the text.
        config: which configuration of a dataset.
        split: which split of a dataset.
        workers: processes that encode; by default one for each core.
        shard_tokens: a shard is full with so many.
        skip_bad: count lines that hold no text, rather than stop at the first.
        report: is called at the start and after each document.
    """
    if isinstance(inputs, str):
        raise ValueError(f"inputs: got {inputs!r}, expected a list of them")
    workers = (os.cpu_count() or 1) if workers is None else workers
    for name, value in {"workers": workers, "shard_tokens": shard_tokens}.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    coder, out = load_tokenizer(tokenizer), Path(out)
    try:
        parts = open_parts(inputs, field=field, config=config, split=split, without=out)
        settings = {
            "format": FORMAT,
            "inputs": [
                {"name": part.name, "bytes": part.size, "checksum": part.checksum} for part in parts
            ],
            "field": field,
            "tokenizer": {"name": coder.name, "sha256": coder.sha256},
            "bos_id": _special(coder, "bos", bos, coder.bos_id),
            "eos_id": _special(coder, "eos", eos, coder.eos_id),
            "shard_tokens": shard_tokens,
        }
        with own_folder(out):
            if not is_finished(out, settings):
                _write_shards(out, settings, coder, parts, workers, skip_bad, report)
    except OSError as reason:
        said = f"{reason.filename or out}: {reason.strerror or reason}"
        raise ValueError(f"{said}; finished shards are kept, the same command goes on") from None
    size, done = sum(part.size for part in parts), TokenFolder(out)
    return Progress(size, size, done.documents, done.tokens, done.skipped)


def _write_shards(
    out: Path,
    settings: dict[str, Any],
    coder: Tokenizer,
    parts: list[Part],
    workers: int,
    skip_bad: bool,
    report: Callable[[Progress], None],
) -> None:
    record = Record.resume(out, settings)
    coder.save(out)
    dtype, size = dtype_for(coder.vocab_size), sum(part.size for part in parts)
    before, after = (_edge(settings[name]) for name in ("bos_id", "eos_id"))
    documents = read_documents(parts, record.place, record.skipped, skip_bad=skip_bad)
    texts = ((document.text, document) for document in documents)
    tokens, count = record.tokens, record.documents
    writer = ShardWriter(out, dtype, settings["shard_tokens"], first=len(record.shards))
    with closing(writer), closing(encode_in_order(texts, coder, workers)) as encoded:
        skipped, read = record.skipped, sum(part.size for part in parts[: record.place.part])
        report(Progress(read, size, count, tokens, skipped))
        for ids, document in encoded:
            skipped = document.skipped
            if len(ids) > 0:
                shard = writer.add(np.concatenate([before, ids, after]))
                tokens, count = tokens + len(before) + len(ids) + len(after), count + 1
                if shard is not None:
                    record.add(shard, document.after, skipped)
            report(Progress(document.read, size, count, tokens, skipped))
        record.add(writer.finish(), Place(len(parts), 0), skipped)
    record.finish(dtype, coder.vocab_size)


def _special(coder: Tokenizer, name: str, asked: str, own: int | None) -> int | None:
    if asked in (AUTO, NONE):
        return own if asked == AUTO else None
    found = coder.token_id(asked)
    if found is None:
        expected = f"{AUTO}, {NONE} or a token of the vocabulary"
        raise ValueError(f"{name}: got {asked!r}, expected {expected}")
    return found


def _edge(token: int | None) -> np.ndarray:
    return np.array([] if token is None else [token], np.uint32)
