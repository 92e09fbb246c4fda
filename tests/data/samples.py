"""Small texts, and tokenizers that were trained on them."""

import io
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.trainers import BpeTrainer

TEXTS = [
    "The state forgets, then it writes: S_t = decay * S_{t-1} + k v^T.",
    "naïve café 漢字 🙂\r\n\ttabs and  two spaces ",
    "x",
    "",
    "def f(x):\n    return x + 1\n\n\nprint(f(2))\n",
    "a <s> b <|endoftext|> c </s>",
    " ".join(f"word{i % 17} number {i}," for i in range(400)),
    "one line\nanother line\n",
]


def byte_level() -> tokenizers.Tokenizer:
    """A BPE in the manner of GPT-2."""
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    own.train_from_iterator(TEXTS * 3, trainer)
    return own


def save_json(file: Path) -> Path:
    byte_level().save(str(file))
    return file


def save_sentencepiece(file: Path) -> Path:
    """A BPE in the manner of Llama 2: spaces kept, bytes for unknown characters, <s> 1 and </s> 2."""
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    file.write_bytes(model.getvalue())
    return file


def save_tokenizer(folder: Path, kind: str) -> str:
    """What to load for a tokenizer of a kind."""
    match kind:
        case "json":
            return str(save_json(folder / "tokenizer.json"))
        case "sentencepiece":
            return str(save_sentencepiece(folder / "some.model"))
        case "gpt2":
            byte_level().model.save(str(folder))
            return str(folder)
    return "bytes"


def save_lines(file: Path, texts: list[str] = TEXTS) -> Path:
    file.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    return file
