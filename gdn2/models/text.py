"""Text as its tokens come: whole characters only, nothing of a string that ends it."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of the first bytes of a character


class TextStream:
    """Turns tokens into text, piece by piece, until one of `stops` appears, which is not part of it."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._recent: list[int] = []  # tokens that the next ones may still change the text of
        self._settled = 0  # of these, how many are in the text already
        self._held = ""  # text that may be the beginning of a stop
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        self._recent.append(token)
        before = self._decode(self._recent[: self._settled])
        text = self._decode(self._recent)
        # Perhaps of bytes that are none of a character: nobody knows before one is whole.
        if text.endswith(UNFINISHED):
            return ""
        # Tokens with some text are kept before the next: some tokenizers drop the space at the beginning of a text.
        if len(text) > len(before):
            self._recent = self._recent[self._settled :]
        elif text == before and (before or token in self._recent[:-1]):
            self._recent.pop()  # or thousands without text would be decoded again each time
        self._settled = len(self._recent)
        return self._checked(text[len(before) :])

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        whole, before = self._decode(self._recent), self._decode(self._recent[: self._settled])
        rest = self._checked(whole[len(before) :])
        return rest + ("" if self.stopped else self._held)

    def _checked(self, text: str) -> str:
        """What of held and new text is neither a stop nor may become one."""
        text = self._held + text
        places = [text.find(stop) for stop in self._stops if stop in text]
        if places:
            self.stopped = True
            return text[: min(places)]
        beginnings = (n for stop in self._stops for n in range(1, len(stop)))
        kept = max((n for n in beginnings if self._may_stop(text[-n:], n)), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _may_stop(self, end: str, length: int) -> bool:
        return len(end) == length and any(stop.startswith(end) for stop in self._stops)
