"""Every kind of tokenizer encodes as its library does, adds nothing on its own, and survives being saved."""

import json
import os
import pickle
import random
import sys
from collections.abc import Sequence
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from gdn2.data.byte_tokenizer import ByteTokenizer
from gdn2.data.encoding import drops_spaces, encode_in_order, stretches
from gdn2.data.tokenizers import Tokenizer, load_tokenizer
from tests.data.samples import TEXTS, byte_level, save_json, save_tokenizer

KINDS = ["bytes", "json", "sentencepiece", "gpt2"]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    (ids,) = tokenizer.encode_texts([text])
    return ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, kind))
    for text in TEXTS:
        ids = encode(tokenizer, text)
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < tokenizer.vocab_size
        # Not even where the text names them.
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_the_same(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, kind))
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    encode(tokenizer, TEXTS[5])  # so that what is made on first use is there
    again, sent = load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))
    for other in (again, sent):
        for text in TEXTS:
            assert encode(other, text) == encode(tokenizer, text)
            assert other.encode(text) == tokenizer.encode(text)
            assert other.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        sizes = (other.vocab_size, other.bos_id, other.eos_id)
        assert sizes == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)


def test_json_and_gpt2_folders_agree_with_the_library(tmp_path: Path) -> None:
    library = byte_level()
    gpt2 = load_tokenizer(save_tokenizer(tmp_path, "gpt2"))
    own = load_tokenizer(save_tokenizer(tmp_path, "json"))
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert own.encode(text) == gpt2.encode(text) == ids  # with <|endoftext|> as a token
    assert encode(own, TEXTS[0]) == own.encode(TEXTS[0])
    assert own.bos_id == own.eos_id == gpt2.eos_id == own.token_id("<|endoftext|>") == 0
    assert own.token_id("<s>") is None


def test_sentencepiece_agrees_with_the_library(tmp_path: Path) -> None:
    file = save_tokenizer(tmp_path, "sentencepiece")
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=file)
    own = load_tokenizer(file)
    for text in TEXTS:
        assert encode(own, text) == library.encode(text)
        assert own.encode(text) == [1, *library.encode(text)]
    assert (own.bos_id, own.eos_id, own.vocab_size) == (1, 2, 400)
    assert (own.token_id("</s>"), own.token_id("<nowhere>")) == (2, None)
    assert own.decode([1, *library.encode("hello"), 2, 999]) == "hello"


def test_special_tokens_are_found_where_the_files_name_them(tmp_path: Path) -> None:
    own = byte_level()
    own.add_special_tokens(["<s>", "</s>", "<b>"])
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(t, own.token_to_id(t)) for t in ("<s>", "</s>")]
    )
    own.enable_truncation(5)
    own.enable_padding(length=5)
    own.save(str(tmp_path / "tokenizer.json"))
    added = load_tokenizer(tmp_path)
    assert (added.bos_id, added.eos_id) == (own.token_to_id("<s>"), own.token_to_id("</s>"))
    plain = byte_level().encode(TEXTS[0]).ids
    assert encode(added, TEXTS[0]) == plain  # neither template, nor truncation, nor padding
    assert added.encode(TEXTS[0]) == [added.bos_id, *plain]  # a text that may go on
    assert added.encode("") == [added.bos_id]
    config = {"bos_token": {"content": "<b>"}, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = load_tokenizer(tmp_path)
    assert (named.bos_id, named.eos_id) == (own.token_to_id("<b>"), 0)
    (tmp_path / "copy").mkdir()
    named.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").bos_id == own.token_to_id("<b>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "tokenizer: got '.*nowhere', expected 'bytes' or a tokenizer.json, "),
        ("some.txt", "x", "tokenizer: got '.*some.txt', expected 'bytes' or a tokenizer.json, "),
        ("tokenizer.json", "{", "tokenizer.json: got .*, expected a tokenizer.json$"),
        ("vocab.json", "{}", "merges.txt: there is no such file, expected one beside vocab.json$"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / name)


def test_a_text_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    """The library has no kind of exception for it."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="[UNK]"))
    made.save(str(tmp_path / "tokenizer.json"))
    coder = load_tokenizer(tmp_path)
    for call in (lambda: coder.encode("b"), lambda: coder.encode_texts(["a", "b"])):
        with pytest.raises(ValueError, match=r"^tokenizer\.json: got .*UNK.*, expected one that"):
            call()


def test_a_damaged_sentencepiece_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    for content in ("x", ""):
        (tmp_path / "tokenizer.model").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer.model: damaged, expected a SentencePiece"):
            load_tokenizer(tmp_path)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    save_json(tmp_path / "tokenizer.json")
    for content in ("{", "[]", '{"bos_token": 5}', '{"eos_token": {"content": ["a"]}}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(
            ValueError, match=r"tokenizer_config.json: (..._token: )?got .*, expected"
        ):
            load_tokenizer(tmp_path)


def test_a_sentencepiece_model_has_a_file_that_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    own = load_tokenizer(save_tokenizer(tmp_path, "sentencepiece"))
    folder = tmp_path / "saved"
    folder.mkdir()
    own.save(folder)
    other = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rand = random.Random(0)
    letters = " \n\tab,é漢🙂0▁<the"
    texts = ["".join(rand.choices(letters, k=rand.randint(0, 30))) for _ in range(500)]
    for text in [*(text for text in TEXTS if "<s>" not in text), *texts]:
        assert other.encode(text).ids == own.encode(text), text
    again = load_tokenizer(folder)  # by the model itself
    assert (again.name, again.sha256) == (own.name, own.sha256)
    again.save(folder)
    assert load_tokenizer(folder).sha256 == own.sha256
    other.add_tokens(["a word of its own"])
    other.save(str(folder / "tokenizer.json"))  # which no longer says the same
    assert load_tokenizer(folder).vocab_size == own.vocab_size + 1


def test_what_a_config_says_of_a_model_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the class, where a file of another is written."""
    pytest.importorskip("sentencepiece")
    name = save_tokenizer(tmp_path, "sentencepiece")
    config = Path(name).with_name("tokenizer_config.json")
    given = {"tokenizer_class": "T5Tokenizer", "eos_token": "<pad>", "more": 1}
    config.write_text(json.dumps(given))
    folder = tmp_path / "saved"
    folder.mkdir()
    load_tokenizer(name).save(folder)
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    assert saved | given == saved | {"tokenizer_class": "T5Tokenizer"}
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    monkeypatch.setattr("gdn2.data.tokenizers.as_json", lambda model: None)
    load_tokenizer(name).save(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text()) == given


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        ValueError, match=r"needs .* sentencepiece, .* pip install \"gdn2\[data\]\""
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 63, 1000])
def test_stretches_of_a_long_text_give_the_tokens_of_the_whole(
    tmp_path: Path, kind: str, size: int
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, kind))
    assert drops_spaces(tokenizer) == (kind == "sentencepiece")
    for number, text in enumerate([*TEXTS, "  lead", "trail ", "漢" * 300, "a b"]):
        cut = list(stretches([(text, number)], drops_spaces(tokenizer), size))
        assert [mark for _, mark in cut] == [None] * (len(cut) - 1) + [number]
        joined = [i for stretch, _ in cut for i in encode(tokenizer, stretch)]
        assert joined == encode(tokenizer, text)
    assert len(list(stretches([(TEXTS[6], 0)], False, size))) > len(TEXTS[6]) // (size + 40)


def test_texts_are_encoded_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn2.data.encoding.BATCH", 50)
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, "json"))
    texts = [(text, number) for number, text in enumerate(TEXTS * 3)]
    for workers in (1, 2):
        found = [(ids.tolist(), mark) for ids, mark in encode_in_order(texts, tokenizer, workers)]
        assert found == [(encode(tokenizer, text), number) for text, number in texts]


class Fatal(ByteTokenizer):
    """Ends every process but the first."""

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        if parent_process() is not None:
            os._exit(9)
        return super().encode_texts(texts)


def test_a_process_that_is_killed_is_named() -> None:
    with pytest.raises(ValueError, match=r"^workers: one was killed, for lack of memory perhaps$"):
        list(encode_in_order([("x", 0)], Fatal(), 2))
