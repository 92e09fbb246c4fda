"""Text as the tokens that are scored, by lm-eval's rules."""

from collections.abc import Iterator
from itertools import pairwise

from gdn2.data.tokenizers import Tokenizer
from gdn2.evals.likelihood import Pair
from gdn2.evals.prefixes import Tokens
from gdn2.models.config import ModelConfig
from gdn2.ops.arguments import require

# Some embeddings are larger, to be a multiple of one of these.
ROUNDED = tuple(2**i for i in range(10))


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuse a tokenizer that is not the model's: every token would mean something else."""
    own, known = tokenizer.vocab_size, config.vocab_size
    fits = any(known == -(-own // multiple) * multiple for multiple in ROUNDED)
    require(fits, "tokenizer", f"{tokenizer.name} of {own} tokens", f"the model's {known}")


def first_token(tokenizer: Tokenizer) -> int:
    """What stands before a text where nothing does: the token that opens or ends a document, or a line break."""
    known = (tokenizer.bos_id, tokenizer.eos_id, int(tokenizer.encode_texts(["\n"])[0][0]))
    return next(token for token in known if token is not None)


def encode_context(tokenizer: Tokenizer, text: str) -> Tokens:
    """A context's tokens, at least one."""
    return tuple(tokenizer.encode(text)) or (first_token(tokenizer),)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Both texts encoded as one and parted where the context's tokens end; its last spaces go to the continuation."""
    if not context:
        prefix, rest = first_token(tokenizer), tokenizer.encode_texts([continuation])[0].tolist()
        pair = Pair((prefix,), tuple(rest[1:] if rest[:1] == [prefix] else rest))
    else:
        spaces = len(context) - len(context.rstrip())
        words = context[: len(context) - spaces]
        before, whole = tokenizer.encode(words), tokenizer.encode(context + continuation)
        pair = Pair(tuple(before) or (first_token(tokenizer),), tuple(whole[len(before) :]))
    said = f"{continuation!r} after {context[-40:]!r}"
    require(len(pair.continuation) > 0, "continuation", said, "one that adds a token")
    return pair


def rolling_pairs(tokenizer: Tokenizer, text: str, window: int | None) -> list[Pair]:
    """Pairs whose continuations make up a text.

    Each continuation is `window` tokens and is read after the one token before it, the first after `first_token`; the
    last, which may be shorter, after as many as fill the window. Without a window the text is one continuation.
    """
    require(window is None or window >= 1, "window", window, "at least 1")
    tokens = tuple(tokenizer.encode(text))
    if not tokens:
        return []
    whole, window = (first_token(tokenizer), *tokens), window or len(tokens)
    return list(_windows(whole, window))


def _windows(whole: Tokens, window: int) -> Iterator[Pair]:
    last = len(whole) - 1
    for start, end in pairwise([*range(0, last, window), last]):
        yield Pair(whole[max(0, end - window) : start + 1], whole[start + 1 : end + 1])
