"""Requests in a file, to be answered where neither lm-eval nor the data are: a line about them, then one for each."""

import gzip
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gdn2.evals.documents import read_text
from gdn2.evals.request import JSON, Request

FORMAT = "gdn2 requests 1"
WINDOW = "window"  # in the metadata of a rolling request: its tokens, or None to carry the state through the text


def key_of(request: Request) -> str:
    """Thirty-two digits that requests with the same answer share."""
    asked = [request.kind, request.context, request.continuation, request.until, request.max_tokens]
    text = json.dumps([*asked, request.metadata.get(WINDOW)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_requests(path: Path, requests: Sequence[Request], about: Mapping[str, JSON]) -> None:
    """Write a whole file in place of an older one; its name may end in .gz."""
    body = "".join(json.dumps(asdict(request)) + "\n" for request in requests)
    head = {"format": FORMAT, "requests": len(requests), "sha256": _checksum(body), **about}
    content = (json.dumps(head) + "\n" + body).encode()
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def read_requests(path: Path) -> tuple[dict[str, Any], list[Request]]:
    """What a file says about its requests, and these."""
    first, _, body = read_text(path).partition("\n")
    try:
        about = json.loads(first)
    except ValueError:
        about = None
    kind = about.get("format") if isinstance(about, dict) else None
    if not isinstance(about, dict) or kind != FORMAT:
        raise ValueError(f"{path}: got format {kind!r}, expected {FORMAT!r}")
    if _checksum(body) != about.get("sha256"):
        lines = body.count("\n")
        wanted = f"{about.get('requests')} requests with the checksum of the first line"
        raise ValueError(f"{path}: got {lines} lines that were cut or changed, expected {wanted}")
    return about, [_request(line) for line in body.splitlines()]


def _request(line: str) -> Request:
    fields = json.loads(line)
    return Request(**fields | {"until": tuple(fields["until"])})


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
