"""Checkpoints in other people's names come back as the same model, and wrong ones are refused by name."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer
from typer.testing import CliRunner

import gdn2
from gdn2.cli import app
from gdn2.data.tokenizers import load_tokenizer
from gdn2.hf.foreign import foreign_tensors, unsaid_of
from gdn2.hf.importing import Unsaid, import_model, read_checkpoint
from gdn2.models.folder import load_stop_ids
from tests.data.samples import save_tokenizer
from tests.hf.foreign import (
    FLA,
    LAYER,
    OFFICIAL,
    WINDOW,
    Tensors,
    around_fla,
    assert_same,
    hybrid,
    official,
)
from tests.models.cases import config, make, tokens


def test_official_checkpoints_come_back(tmp_path: Path) -> None:
    """With what a trainer saves beside the model, and prefixes of wrappers."""
    model = hybrid()
    assert_same(import_model(official(model), OFFICIAL), model)
    wrapped = {f"_forward_module.{name}": x for name, x in official(model).items()}
    extras = {"optimizer": {"state": {0: torch.ones(3)}}, "hparams": {"lr": 1e-3}, "step_count": 7}
    torch.save({"model": wrapped, **extras}, tmp_path / "step.pth")
    assert_same(import_model(read_checkpoint(tmp_path / "step.pth"), OFFICIAL), model)
    recurrent = make(config(replace(LAYER, num_value_heads=4), layers=3)).float()
    assert_same(import_model(official(recurrent), OFFICIAL), recurrent)


def test_models_around_flas_layer_come_back(tmp_path: Path) -> None:
    model = hybrid(output_gate="sigmoid")
    tensors = around_fla(model)
    assert_same(import_model(tensors, FLA), model)
    others = {"embeddings": "embed_tokens", "attn_norm": "input_layernorm", "model.layers": "net.h"}
    others |= {"mlp_norm": "post_attention_layernorm", ".attn.": ".mixer.gdn2.", "model.": "net."}
    renamed = {}
    for name, x in tensors.items():
        for old, new in others.items():
            name = name.replace(old, new)  # noqa: PLW2901
        renamed[name] = x.contiguous()
    save_file(renamed, tmp_path / "model.safetensors")
    assert_same(import_model(read_checkpoint(tmp_path), FLA), model)


def test_the_gate_must_be_said_where_the_file_cannot() -> None:
    tensors = around_fla(hybrid())
    with pytest.raises(
        ValueError, match=r"^output_gate: got None, expected silu, as in the released code, or sigm"
    ):
        import_model(tensors, replace(FLA, output_gate=None))
    ids = tokens(1, 5)
    silu, sigmoid = (
        import_model(tensors, replace(FLA, output_gate=g)) for g in ("silu", "sigmoid")
    )
    assert not torch.allclose(silu(ids).logits, sigmoid(ids).logits)


@pytest.mark.parametrize("size", [0, -2])
def test_heads_have_channels(size: int) -> None:
    with pytest.raises(ValueError, match=f"^head_dim: got {size}, expected at least 1$"):
        Unsaid(head_dim=size)


@pytest.mark.parametrize("name", ["c.safetensors", "c.pth"])
def test_a_file_is_copied_once(name: str, tmp_path: Path) -> None:
    model = hybrid()
    write: Any = save_file if name == "c.safetensors" else torch.save
    write(official(model), tmp_path / name)
    tensors = read_checkpoint(tmp_path / name)
    assert not any(x.untyped_storage().resizable() for x in tensors.values())  # in the file's map
    found = import_model(tensors, OFFICIAL)
    assert all(x.untyped_storage().resizable() for x in found.parameters())
    assert_same(found, model)


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding() -> None:
    layer = replace(LAYER, output_gate="sigmoid", gate_rank=LAYER.value_head_dim)
    model = make(config(layer, tied=True)).float()
    table = model.embedding.weight.detach()
    tensors = foreign_tensors(model, "fla")
    assert "lm_head.weight" not in tensors
    for head in (table, table.clone()):
        found = import_model({**tensors, "lm_head.weight": head}, unsaid_of(model.config))
        assert_same(found, model)
    for other in (table + 1, table.bfloat16(), table[1:]):
        with pytest.raises(ValueError, match=r"^checkpoint: got unexpected lm_head\.weight, expec"):
            import_model({**tensors, "lm_head.weight": other}, unsaid_of(model.config))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    tensors = official(hybrid())
    averages = {f"module.{name}": torch.zeros_like(x) for name, x in tensors.items()}
    compiled = {f"_orig_mod.{name}": x for name, x in tensors.items()}
    torch.save({"model": averages | compiled}, tmp_path / "c.pth")
    with pytest.raises(
        ValueError,
        match=r"^checkpoint: got transformer\.wte\.weight twice, in wrappers, expected each once$",
    ):
        read_checkpoint(tmp_path / "c.pth")


def test_numbers_that_torch_does_not_have_are_a_line(tmp_path: Path) -> None:
    held = {"x": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}
    header = json.dumps(held).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(6)
    (tmp_path / "c.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=r"c\.safetensors: x: got .*F6_E2M3, expected a tensor$"):
        read_checkpoint(tmp_path / "c.safetensors")


def test_tensors_may_lie_in_any_order() -> None:
    model = hybrid()
    turned = {name: x.T.contiguous().T if x.ndim == 2 else x for name, x in official(model).items()}
    assert_same(import_model(turned, OFFICIAL), model)


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def in_dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("transformer.h.2.attn.A_log"), r"got no transformer\.h\.2\.attn\.A_log, expected"),
        (without("transformer.h.0.norm_1.weight"), r"got no transformer\.h\.0\.norm_1\.weight, e"),
        (without("transformer.h.1.attn.attn.weight"), r"no transformer\.h\.1\.attn\.attn\.weight"),
        (without("lm_head.weight"), r"got no lm_head\.weight, expected the tensors of its blocks"),
        (
            lambda tensors: tensors.update(rotary=torch.ones(1)),
            r"^checkpoint: got unexpected rotary, expected the tensors of its blocks and no others$",
        ),
        (
            changed("transformer.h.2.attn.dt_bias", lambda x: x[:-1]),
            r"^checkpoint: transformer\.h\.2\.attn\.dt_bias: got shape \(9,\), expected \(10,\)$",
        ),
        (
            changed("transformer.h.0.mlp.swiglu.w3.weight", lambda x: x.T),
            r"^checkpoint: transformer\.h\.0\.mlp\.swiglu\.w3\.weight: got shape \(14, 10\), exp",
        ),
        (
            changed("transformer.wte.weight", lambda x: x.T),
            r"^checkpoint: transformer\.wte\.weight: got shape \(10, 23\), expected \(23, 10\)$",
        ),
        (
            changed("transformer.h.3.attn.attn.weight", lambda x: x.T),
            r"^checkpoint: transformer\.h\.3\.attn\.attn\.weight: got shape \(10, 30\), expected rows",
        ),
        (
            changed("transformer.h.0.attn.k_conv1d.weight", lambda x: x[..., 0]),
            r"^checkpoint: transformer\.h\.0\.attn\.k_conv1d\.weight: got shape \(10, 1\), expec",
        ),
        (
            lambda tensors: tensors.update({"transformer.h.1000000000000.x": torch.ones(1)}),
            r"^checkpoint: got a block transformer\.h\.1000000000000, expected at most 62, as many",
        ),
        (lambda tensors: tensors.clear(), r"^checkpoint: got no tensor ….q_conv1d.weight, expecte"),
        *(
            (
                changed(f"transformer.h.0.attn.{name}", lambda x: x.new_empty(0)),
                rf"^checkpoint: transformer\.h\.0\.attn\.{name}: got shape \(0,\), expected some num",
            )
            for name in ("A_log", "dt_bias", "o_norm.weight")
        ),
        *(
            (
                changed("transformer.h.0.attn.q_proj.weight", in_dtype(dtype)),
                rf"^checkpoint: transformer\.h\.0\.attn\.q_proj\.weight: got {dtype}, expected fp64, f",
            )
            for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64)
        ),
    ],
)
def test_wrong_checkpoints_are_refused_by_name(
    spoil: Callable[[Tensors], object], message: str
) -> None:
    tensors = official(hybrid())
    spoil(tensors)
    with pytest.raises(ValueError, match=message) as caught:
        import_model(tensors, OFFICIAL)
    assert "\n" not in str(caught.value)


class Bomb:
    """What a pickle that executes code looks like."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    torch.save(
        {"model": official(hybrid()), "hparams": Bomb(tmp_path / "harm")}, tmp_path / "c.pth"
    )
    with pytest.raises(
        ValueError, match=r"c\.pth: got .*expected a checkpoint of tensors and plain"
    ):
        read_checkpoint(tmp_path / "c.pth")
    torch.save(Bomb(tmp_path / "harm"), tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"c\.pth: got .*expected a checkpoint of tensors and pla"):
        read_checkpoint(tmp_path / "c.pth")
    assert not (tmp_path / "harm").exists()
    torch.save({"model": official(hybrid())}, tmp_path / "c.pth")
    whole = (tmp_path / "c.pth").read_bytes()
    rand = random.Random(0)
    noise = [prefix + rand.randbytes(300) for prefix in 100 * (b"", b"\x80\x02", b"}(", b"K\x01")]
    for content in (b"no checkpoint", b"", b"\x80\x02", whole[:5000], b"\x87.", *noise):
        (tmp_path / "c.pth").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"c\.pth: got .*\w.*, expected a checkpoint of tensors and plain"
        ) as caught:
            read_checkpoint(tmp_path / "c.pth")
        assert "weights_only" not in str(caught.value)
    torch.save({"model": {"x": 3}}, tmp_path / "c.pth")
    with pytest.raises(ValueError, match=r"^checkpoint: x: got int, expected a tensor$"):
        read_checkpoint(tmp_path / "c.pth")
    with pytest.raises(ValueError, match=r"nowhere, which is not there, expected a file or a fold"):
        read_checkpoint(tmp_path / "nowhere")


def test_the_command_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn2.cli.hub.find_spec", lambda name: None)
    for verb in ("import", "export"):
        refused = CliRunner().invoke(app, [verb, "a", "b"])
        assert refused.exit_code == 2
        assert refused.output == (
            'error: transformers is not installed; pip install "gdn2[hf]" installs it\n'
        )


def test_the_command_writes_a_model_folder(tmp_path: Path) -> None:
    model = hybrid(output_gate="sigmoid")
    torch.save(around_fla(model), tmp_path / "fla.pth")
    command = ["import", str(tmp_path / "fla.pth"), str(tmp_path / "m")]
    command += ["--head-dim", "2", "--window", "5"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "error: output_gate: got None, expected silu" in refused.output
    done = CliRunner().invoke(app, [*command, "--output-gate", "sigmoid"])
    assert done.exit_code == 0, done.output
    assert done.output == (
        f"wrote {tmp_path / 'm'}: 4,610 parameters; not in the file: --output-gate sigmoid "
        "--erase-range 1.0 --head-dim 2 --window 5 --rotary-base 10000.0 --norm-eps 1e-05\n"
    )
    refused = CliRunner().invoke(app, [*command, "--output-gate", "silu"])
    assert refused.exit_code == 2
    assert (
        f"error: folder: got {tmp_path / 'm'}, which exists, expected a new one" in refused.output
    )
    assert_same(gdn2.load(tmp_path / "m"), model)


def test_the_command_takes_blocks_of_several_attentions(tmp_path: Path) -> None:
    shared = replace(WINDOW, num_heads=6, num_kv_heads=3)
    model = make(config(LAYER, WINDOW, LAYER, shared, layers=4)).float()
    save_file(around_fla(model), tmp_path / "c.safetensors")
    command = ["import", str(tmp_path / "c.safetensors"), str(tmp_path / "m")]
    command += ["--head-dim", "2", "--window", "5", "--output-gate", "silu"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert_same(gdn2.load(tmp_path / "m"), model)


def test_a_broken_import_leaves_nothing_and_takes_nothing_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(replace(config(LAYER), vocab_size=400)).float()
    save_file(around_fla(model), tmp_path / "fla.safetensors")
    name = save_tokenizer(tmp_path, "json")
    command = ["import", str(tmp_path / "fla.safetensors"), str(tmp_path / "m")]
    command += ["--tokenizer", name, "--output-gate", "sigmoid"]

    def stop(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("gdn2.hf.special_tokens.write_special_tokens", stop)
        assert CliRunner().invoke(app, command).exit_code == 2
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert CliRunner().invoke(app, command).exit_code == 0
    (tmp_path / "m").rename(tmp_path / ".m.old")  # as a kill between two renames leaves it
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "m, which exists, expected a new one" in refused.stderr


def test_files_that_are_no_archives_are_read_too(tmp_path: Path) -> None:
    model = hybrid()
    torch.save(official(model), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    found = import_model(read_checkpoint(tmp_path / "old.pth"), OFFICIAL)
    assert_same(found, model)


def test_the_command_takes_any_tokenizer_that_fits(tmp_path: Path) -> None:
    model = make(replace(config(LAYER), vocab_size=400)).float()
    save_file(around_fla(model), tmp_path / "fla.safetensors")
    command = ["import", str(tmp_path / "fla.safetensors"), "--output-gate", "silu"]
    command += ["--tokenizer", save_tokenizer(tmp_path, "sentencepiece")]  # under a name of its own
    done = CliRunner().invoke(app, [*command, str(tmp_path / "m")])
    assert done.exit_code == 0, done.output
    text = "one line\nanother line"
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "m"), load_tokenizer(tmp_path / "m")
    assert theirs(text).input_ids == ours.encode(text)
    assert ours.encode(text)[0] == ours.bos_id
    assert load_stop_ids(tmp_path / "m") == [ours.eos_id]

    small = make(replace(config(LAYER), vocab_size=300)).float()
    save_file(around_fla(small), tmp_path / "fla.safetensors")
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "small")])
    assert refused.exit_code == 2
    assert "error: tokenizer: got 400 tokens, expected at most the model's 300" in refused.output
    assert not (tmp_path / "small").exists()
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, [*command[:-2], str(tmp_path / "file/m")])
    assert refused.exit_code == 2
    assert "error: got [Errno 20]" in refused.output
