"""A SentencePiece model as a tokenizer.json, for libraries that would read the model itself in another way.

transformers orders its merges by the numbers of the pieces instead of their scores, and puts no space before a text
that begins with one: texts with several spaces in a row get other tokens than SentencePiece gives them.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

SPACE = "▁"
PROBES = (
    *("a", " a", "  two", "two  spaces   and more ", "\n\nlines\n of text\t", "    indented(x)[0] = 12;"),
    *("naïve café", "漢字 and kana かな", "🙂🙂 \u200d", "\x00\x7f", "ĳﬀ ①½ Å", "the same the same", "aaaaaaaaaaaaaaa"),
)  # fmt: skip


def as_json(model: Any) -> str | None:
    """The file's content; None where it would not give the model's own tokens, as for models that are no BPE."""
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    plain = [i for i in range(len(pieces)) if not _is_special(model, i)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        return None
    known = {pieces[i] for i in plain}
    ranked = sorted((i for i in plain if len(pieces[i]) > 1), key=lambda i: -model.get_score(i))
    merges = [
        (pieces[i][:n], pieces[i][n:])
        for i in ranked
        for n in range(1, len(pieces[i]))
        if pieces[i][:n] in known and pieces[i][n:] in known
    ]
    unknown = pieces[model.unk_id()] if model.unk_id() >= 0 else None
    bytes_too = any(model.is_byte(i) for i in range(len(pieces)))
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if any(made.encode(text).ids != model.encode(text) for text in PROBES):
        return None
    special = [piece for i, piece in enumerate(pieces) if model.is_control(i)]
    made.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in special]
    )
    if model.bos_id() >= 0:
        opening = pieces[model.bos_id()]
        made.post_processor = processors.TemplateProcessing(
            single=f"{opening} $A",
            pair=f"{opening} $A {opening} $B",
            special_tokens=[(opening, model.bos_id())],
        )
    return str(made.to_str())


def _is_special(model: Any, i: int) -> bool:
    kinds = (model.is_control, model.is_unknown, model.is_byte, model.is_unused)
    return any(kind(i) for kind in kinds)
