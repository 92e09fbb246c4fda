"""A model folder gives back every bit, is written whole or not at all, and says what is wrong with it."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gdn2
from gdn2.models.folder import load_config, load_model, load_stop_ids, open_model, save_model
from gdn2.models.language_model import LanguageModel
from tests.layers.cases import DELTA, MIXERS
from tests.models.cases import EVERYTHING, config, make, tokens

SMALL = config(DELTA, MIXERS["window"])


def same(a: LanguageModel, b: LanguageModel) -> bool:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    return ours.keys() == theirs.keys() and all(
        x.dtype == theirs[n].dtype and torch.equal(x, theirs[n]) for n, x in ours.items()
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_the_model_back(tmp_path: Path, tied: bool) -> None:
    model = make(replace(EVERYTHING, tie_word_embeddings=tied))
    gdn2.save(model, tmp_path / "m")
    found = gdn2.load(tmp_path / "m")
    assert found.config == model.config
    assert same(found, model)
    assert names(tmp_path) == ["m"]
    assert names(tmp_path / "m") == ["config.json", "model.safetensors"]
    ids = tokens(2, 7)
    assert torch.equal(found(ids).logits, model(ids).logits)
    found(ids, targets=ids).loss.backward()  # parameters can be trained
    assert all(parameter.grad is not None for parameter in found.parameters())


def test_decays_stay_exact_and_dtypes_can_be_chosen(tmp_path: Path) -> None:
    model = LanguageModel(SMALL).cast(torch.bfloat16)
    save_model(model, tmp_path / "m")
    assert json.loads((tmp_path / "m/config.json").read_text())["dtype"] == "bfloat16"
    found = load_model(tmp_path / "m")
    assert found.get_parameter("blocks.0.mixer.decay_bias").dtype == torch.float32
    assert same(found, model)
    wide = load_model(tmp_path / "m", dtype=torch.float64, device="cpu")
    assert same(wide, model.double())


def test_the_config_speaks_hugging_face(tmp_path: Path) -> None:
    save_model(LanguageModel(SMALL), tmp_path / "m", stop_ids=[3, 4])
    said = json.loads((tmp_path / "m/config.json").read_text())
    assert said["model_type"] == "gdn2"
    assert said["architectures"] == ["Gdn2ForCausalLM"]
    assert said["layer_types"] == ["linear_attention", "sliding_attention"]
    assert (said["sliding_window"], said["hidden_size"], said["dtype"]) == (5, 10, "float32")
    assert load_stop_ids(tmp_path / "m") == [3, 4]
    # What transformers adds when it writes the same file is no mistake.
    more = {"transformers_version": "5.17.0", "use_cache": True, "eos_token_id": 2}
    (tmp_path / "m/config.json").write_text(json.dumps({**said, **more}))
    assert load_config(tmp_path / "m") == SMALL
    (tmp_path / "m/generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_stop_ids(tmp_path / "m") == [7]


@pytest.mark.parametrize("said", [5.5, "ab", "", [None], [2, "3"], [2, False], True, {"a": 1}])
def test_stop_tokens_that_are_none_are_named(tmp_path: Path, said: object) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": said}))
    message = f"{file}: eos_token_id: got {said!r}, expected an integer or a list of integers"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_stop_ids(tmp_path)


@pytest.mark.parametrize(("said", "ids"), [(None, []), ([], []), (0, [0]), ([0, 7], [0, 7])])
def test_stop_tokens_are_one_or_several_or_none(
    tmp_path: Path, said: object, ids: list[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert load_stop_ids(tmp_path) == ids


def test_large_models_are_cut_into_files(tmp_path: Path) -> None:
    model = make(SMALL)
    save_model(model, tmp_path / "m", shard_bytes=4000)
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    sizes = {name: x.nbytes for name, x in model.named_parameters()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"].keys() == sizes.keys()
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert count > 2
    for file in files:
        held = load_file(tmp_path / "m" / file)
        assert sum(x.nbytes for x in held.values()) <= 4000 or len(held) == 1
    assert same(load_model(tmp_path / "m"), model)


def test_tokenizer_files_come_along_and_stay(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "notes.txt"):
        (source / name).write_text(name)
    model, target = LanguageModel(SMALL), tmp_path / "m"
    save_model(model, target, tokenizer=source, stop_ids=[5])
    kept = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    usual = ["config.json", "generation_config.json", "model.safetensors"]
    assert names(target) == sorted([*kept, *usual])
    save_model(model, target)  # what it does not say again stays as it was
    assert names(target) == sorted([*kept, *usual])
    assert load_stop_ids(target) == [5]
    (source / "other.json").write_text('{"model": {}}')
    for _ in range(2):
        save_model(model, target, tokenizer=source / "other.json")
        assert names(target) == sorted(["tokenizer.json", *usual])
    assert (target / "tokenizer.json").read_text() == '{"model": {}}'
    (source / "pieces.model").write_text("pieces")
    save_model(model, target, tokenizer=source / "pieces.model")
    assert names(target) == sorted(["tokenizer.model", *usual])
    (source / "list.json").write_text("{}")
    for name in ("notes.txt", "list.json"):
        said = rf"^tokenizer: got .*{name}, expected a tokenizer.json or .model, or a folder with"
        with pytest.raises(ValueError, match=said):
            save_model(model, target, tokenizer=source / name)


@pytest.mark.parametrize("moment", ["weights", "step aside", "step in"])
@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_write_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, killed: bool
) -> None:
    """By an error, which cleans up, or by a kill, after which nothing does."""
    old, new = make(SMALL), LanguageModel(SMALL)
    save_model(old, tmp_path / "m")
    failure = KeyboardInterrupt if killed else OSError
    plain, renames = Path.rename, 0

    def interrupted(self: Path, target: Any) -> Path:
        nonlocal renames
        renames += 1
        if renames == ("step aside", "step in").index(moment) + 1:
            if killed:  # nobody restores or removes anything any more
                monkeypatch.setattr(Path, "rename", lambda self, target: self)
                monkeypatch.setattr("shutil.rmtree", lambda *given, **options: None)
            raise failure("no space left")
        return plain(self, target)

    if moment == "weights":
        monkeypatch.setattr("gdn2.models.files.save_file", _raise(failure))
    else:
        monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(failure):
        save_model(new, tmp_path / "m")
    monkeypatch.undo()
    assert same(load_model(tmp_path / "m"), old)
    if not killed:
        assert names(tmp_path) == ["m"]
    save_model(new, tmp_path / "m")  # and the next one succeeds
    assert same(load_model(tmp_path / "m"), new)
    assert names(tmp_path) == ["m"]


def _raise(failure: type[BaseException]) -> Callable[..., None]:
    def fail(*given: object) -> None:
        raise failure("no space left")

    return fail


def edit_config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def edit_weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            cut("model.safetensors", 5000),
            r"model\.safetensors: got .*, expected a whole safetensors",
        ),
        (cut("model.safetensors", 0), r"model\.safetensors: got .*, expected a whole safetensors"),
        (lambda f: os.remove(f / "model.safetensors"), r"model\.safetensors: got no such file"),
        (cut("config.json", 30), r"config\.json: got .*, expected JSON$"),
        (lambda f: os.remove(f / "config.json"), r"config\.json: got no such file, expected JSON$"),
        (lambda f: (f / "config.json").write_text("[]"), r"got a list, expected a table$"),
        (edit_config(model_type="llama"), r"model_type: got 'llama', expected 'gdn2'$"),
        (
            edit_config(hiden_size=3),
            r"config\.json: hiden_size: unknown name, expected hidden_size",
        ),
        (edit_config(hidden_size="x"), r"config\.json: hidden_size: got 'x', expected an integer$"),
        (
            edit_config(layer_types=["full_attention"]),
            r"layer_types: got \['full_attention'\], exp",
        ),
        (edit_config(sliding_window=9), r"sliding_window: got 9, expected 5, as its cell says$"),
        (
            edit_config(intermediate_size=15),
            r"blocks\.0\.mlp\.gate_proj\.weight: got shape \(14, 10\), expected \(15, 10\)$",
        ),
        (edit_weights(lambda t: t.pop("norm.weight")), r"got missing norm\.weight, expected what"),
        (
            edit_weights(
                lambda t: [t.pop(n) for n in list(t) if "mlp.up" in n or n == "norm.weight"]
            ),
            r"missing blocks\.0\.mlp\.up_proj\.weight, blocks\.1\.mlp\.up_proj\.weight, norm\.weight, e",
        ),
        (edit_weights(lambda t: t.update(x=torch.ones(1))), r"got unexpected x, expected what its"),
        (
            edit_weights(lambda t: t.update({f"x{i}": torch.ones(1) for i in range(5)})),
            r"got unexpected x0, x1, x2 and 2 more, expected",
        ),
        (
            edit_weights(lambda t: t.update({"norm.weight": torch.ones(10).int()})),
            r"norm\.weight: got torch\.int32, expected floating point$",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../b"}}'
            ),
            r"index\.json: weight_map: got \{'a': '\.\./b'\}, expected the file in this folder",
        ),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "m"
    save_model(LanguageModel(SMALL), folder)
    spoil(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (2, "got 2, expected a list of tokens"),
        ("ab", "got 'ab', expected a list of tokens"),
        ([1.5], r"got 1\.5, expected an integer"),
        ([9999], "got 9999, expected 0 to [0-9]+, a token of the model"),
        ([-1], "got -1, expected 0 to [0-9]+, a token of the model"),
    ],
)
def test_stops_that_are_none_of_the_model_are_refused(
    tmp_path: Path, stops: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^stop_ids: {message}$"):
        save_model(LanguageModel(SMALL), tmp_path / "m", stop_ids=stops)
    assert not (tmp_path / "m").exists()


def test_others_may_read_weights_as_any_file(tmp_path: Path) -> None:
    save_model(LanguageModel(SMALL), tmp_path / "m", stop_ids=torch.tensor([1]))
    assert len({file.stat().st_mode for file in (tmp_path / "m").iterdir()}) == 1
    assert load_stop_ids(tmp_path / "m") == [1]


def test_devices_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    save_model(LanguageModel(SMALL), tmp_path / "m")
    with pytest.raises(ValueError, match=r"^device: got meta, expected one that is here and holds"):
        load_model(tmp_path / "m", device="meta")
    with pytest.raises(ValueError, match=r"^device: got 'tpu', expected cpu or cuda$"):
        load_model(tmp_path / "m", device="tpu")
    assert load_model(tmp_path / "m", device="cpu:0").head.weight.device == torch.device("cpu")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(LanguageModel(SMALL), tmp_path / "m", shard_bytes=4000)
    first = sorted((tmp_path / "m").glob("model-00001*"))[0]
    first.unlink()
    with pytest.raises(
        ValueError, match=rf"{first.name}: got no such file, expected a safetensors"
    ):
        load_model(tmp_path / "m")


def test_differences_may_be_accepted(tmp_path: Path) -> None:
    """A missing tensor then begins as in a new model, an unexpected one is left out."""
    model = make(SMALL)
    save_model(model, tmp_path / "m")
    head = "head.weight"
    edit_weights(lambda t: (t.pop(head), t.update(extra=torch.ones(1))))(tmp_path / "m")
    with pytest.warns(
        UserWarning, match=r"got missing head\.weight and unexpected extra, expected"
    ):
        found = load_model(tmp_path / "m", strict=False)
    assert torch.equal(found.get_parameter(head), LanguageModel(SMALL).get_parameter(head))
    norm = "norm.weight"
    assert torch.equal(found.get_parameter(norm), model.get_parameter(norm))


def test_other_peoples_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    model = LanguageModel(SMALL)
    with pytest.raises(
        ValueError, match=r"with thesis\.tex in it, expected a new folder, or a mod"
    ):
        save_model(model, tmp_path)
    with pytest.raises(ValueError, match=r"^path: got the file .*thesis\.tex, expected a folder$"):
        save_model(model, tmp_path / "thesis.tex")
    assert names(tmp_path) == ["thesis.tex"]
    with pytest.raises(ValueError, match=r"^tokenizer: got .*nowhere, expected a tokenizer"):
        save_model(model, tmp_path / "m", tokenizer=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"^shard_bytes: got 0, expected at least 1$"):
        save_model(model, tmp_path / "m", shard_bytes=0)
    assert names(tmp_path) == ["thesis.tex"]


def test_other_weights_beside_a_model_are_not_replaced(tmp_path: Path) -> None:
    model, copy = LanguageModel(SMALL), tmp_path / "model_backup.safetensors"
    save_model(model, tmp_path)
    copy.write_text("years of work")
    with pytest.raises(ValueError, match=r"with model_backup\.safetensors in it, expected a new"):
        save_model(model, tmp_path)
    assert copy.read_text() == "years of work"


def test_a_model_is_opened_by_folder_or_preset(tmp_path: Path) -> None:
    save_model(make(SMALL), tmp_path / "m")
    assert open_model(str(tmp_path / "m")).config == SMALL
    found = open_model("gdn2-1m", device="cpu", dtype=torch.bfloat16)
    assert found.config == gdn2.preset("gdn2-1m")
    assert found.get_parameter("blocks.0.mixer.decay_bias").dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"^model: got 'gdn2-2m', expected a folder with a model, or"
    ):
        open_model("gdn2-2m")


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    first, second = make(SMALL), LanguageModel(SMALL, seed=1)
    gdn2.save(first, tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    for model in (second, first, second):
        gdn2.save(model, tmp_path / "latest")
        assert (tmp_path / "latest").is_symlink()
        assert same(gdn2.load(tmp_path / "run"), model)
        assert same(gdn2.load(tmp_path / "latest"), model)
    assert names(tmp_path) == ["latest", "run"]


def test_the_folder_of_the_process_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"path: got {re.escape(str(tmp_path))}, expected another"):
        gdn2.save(LanguageModel(SMALL), ".")
    assert Path.cwd() == tmp_path and names(tmp_path) == []
