"""Our weights under other people's names: the names and shapes of their files, and back again the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gdn2
from gdn2.cli import app
from gdn2.hf.foreign import foreign_tensors, in_options, taken, unsaid_of
from gdn2.hf.holding import check_held
from gdn2.hf.importing import Unsaid, import_model, read_checkpoint
from gdn2.hf.naming import Format, Gate
from gdn2.layers.config import AttentionConfig, DeltaConfig, Mamba2Config
from gdn2.models.config import ModelConfig
from gdn2.models.language_model import LanguageModel
from gdn2.models.presets import preset, preset_names
from tests.hf.foreign import assert_same
from tests.models.cases import config, make, quantise

D, M, VOCABULARY = 10, 14, 23
H, K, V = 2, 3, 4
LAYER = DeltaConfig(num_heads=H, key_head_dim=K, value_head_dim=V, gate_rank=V)
WINDOW = AttentionConfig(num_heads=5, head_dim=2, window=5)
SHARED = replace(WINDOW, num_heads=6, num_kv_heads=3, rotary_base=500.0)
FORMATS: list[Format] = ["lit-gpt", "fla"]
GATES: dict[str, Gate] = {"lit-gpt": "silu", "fla": "sigmoid"}


def layer_shapes(value_heads: int) -> dict[str, tuple[int, ...]]:
    """The layer's file, in the released code and in fla."""
    values = value_heads * V
    return {
        "q_proj.weight": (H * K, D),
        "k_proj.weight": (H * K, D),
        "v_proj.weight": (values, D),
        "b_proj.weight": (H * K, D),
        "w_proj.weight": (values, D),
        "q_conv1d.weight": (H * K, 1, 4),
        "k_conv1d.weight": (H * K, 1, 4),
        "v_conv1d.weight": (values, 1, 4),
        "f_proj.0.weight": (V, D),
        "f_proj.1.weight": (H * K, V),
        "A_log": (H,),
        "dt_bias": (H * K,),
        "g_proj.0.weight": (V, D),
        "g_proj.1.weight": (values, V),
        "g_proj.1.bias": (values,),
        "o_norm.weight": (V,),
        "o_proj.weight": (D, values),
    }


def official_shapes(hybrid: bool, value_heads: int) -> dict[str, tuple[int, ...]]:
    """Of two blocks, as the released code saves them."""
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCABULARY, D),
        "transformer.ln_f.weight": (D,),
        "lm_head.weight": (VOCABULARY, D),
    }
    for i in range(2):
        block = f"transformer.h.{i}"
        found[f"{block}.norm_1.weight"] = found[f"{block}.norm_2.weight"] = (D,)
        found[f"{block}.mlp.swiglu.w1.weight"] = found[f"{block}.mlp.swiglu.w2.weight"] = (M, D)
        found[f"{block}.mlp.swiglu.w3.weight"] = (D, M)
        own = layer_shapes(value_heads)
        if hybrid and i == 1:
            own = {"attn.weight": (3 * D, D), "proj.weight": (D, D)}
        found |= {f"{block}.attn.{name}": shape for name, shape in own.items()}
    return found


def fla_shapes(hybrid: bool, value_heads: int) -> dict[str, tuple[int, ...]]:
    """Of two blocks, as fla names a model around its layers."""
    found: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (VOCABULARY, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCABULARY, D),
    }
    for i in range(2):
        block = f"model.layers.{i}"
        found[f"{block}.attn_norm.weight"] = found[f"{block}.mlp_norm.weight"] = (D,)
        found[f"{block}.mlp.gate_proj.weight"] = found[f"{block}.mlp.up_proj.weight"] = (M, D)
        found[f"{block}.mlp.down_proj.weight"] = (D, M)
        own = layer_shapes(value_heads)
        if hybrid and i == 1:
            own = {f"{x}_proj.weight": (D, D) for x in "qkvo"}
        found |= {f"{block}.attn.{name}": shape for name, shape in own.items()}
    return found


def model_for(
    form: str, *others: AttentionConfig, layers: int = 2, **changes: Any
) -> LanguageModel:
    layer = replace(LAYER, output_gate=GATES[form], **changes)
    return make(config(layer, *others, layers=layers)).float()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("value_heads", [None, 4])
def test_names_and_shapes_are_those_of_their_files(
    form: Format, hybrid: bool, value_heads: int | None
) -> None:
    model = model_for(form, *[WINDOW] * hybrid, num_value_heads=value_heads)
    shapes = {name: tuple(x.shape) for name, x in foreign_tensors(model, form).items()}
    expected = official_shapes if form == "lit-gpt" else fla_shapes
    assert shapes == expected(hybrid, value_heads or H)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "others", [[], [WINDOW], [WINDOW, WINDOW], [replace(WINDOW, window=None)]], ids=len
)
def test_weights_come_back_bit_for_bit(form: Format, others: list[AttentionConfig]) -> None:
    model = model_for(form, *others, layers=6)
    found = import_model(foreign_tensors(model, form), unsaid_of(model.config))
    assert_same(found, model)
    ours = model.state_dict()
    assert found.state_dict().keys() == ours.keys()
    assert all(torch.equal(x, ours[name]) for name, x in found.state_dict().items())


def test_attentions_rows_are_grouped_by_head() -> None:
    model = model_for("lit-gpt", WINDOW)
    fused = foreign_tensors(model, "lit-gpt")["transformer.h.1.attn.attn.weight"]
    for head in range(5):
        for place, x in enumerate("qkv"):
            rows = fused[6 * head + 2 * place :][:2]
            own = model.state_dict()[f"blocks.1.mixer.{x}_proj.weight"]
            assert torch.equal(rows, own[2 * head : 2 * head + 2])


def test_a_users_own_trunk_may_be_anything() -> None:
    layer = replace(LAYER, output_gate="sigmoid", erase_range=2.0, conv_width=3)
    own = replace(config(SHARED, layer, tied=True), rms_norm_eps=1e-6)
    model = make(own).float()
    assert_same(import_model(foreign_tensors(model, "fla"), unsaid_of(own)), model)
    assert in_options(unsaid_of(own)) == (
        "--output-gate sigmoid --erase-range 2.0 --head-dim 2 --window 5 --rotary-base 500.0 "
        "--norm-eps 1e-06 --tied"
    )
    assert taken(unsaid_of(own), own) == (
        "--output-gate sigmoid --erase-range 2.0 --head-dim 2 --window 5 --rotary-base 500.0 "
        "--norm-eps 1e-06"
    )
    assert taken(Unsaid(), config(LAYER)) == "--output-gate silu --erase-range 1.0 --norm-eps 1e-05"


@pytest.mark.parametrize("form", FORMATS)
def test_another_gate_must_be_said(form: Format) -> None:
    computed = GATES[form]
    other: Gate = "silu" if computed == "sigmoid" else "sigmoid"
    model = make(config(replace(LAYER, output_gate=other))).float()
    with pytest.raises(ValueError) as caught:
        foreign_tensors(model, form)
    assert str(caught.value) == (
        f"output_gate: got {other}, expected {computed}, which {form} computes; "
        f"--output-gate {other} writes the weights all the same"
    )
    tensors = foreign_tensors(model, form, output_gate=other)
    assert_same(import_model(tensors, unsaid_of(model.config)), model)
    with pytest.raises(ValueError, match=rf"^output_gate: got {computed}, expected {other}, the m"):
        foreign_tensors(model, form, output_gate=computed)


def hybrid_of(delta: dict[str, Any], attention: dict[str, Any], **others: Any) -> ModelConfig:
    cell = replace(LAYER, **delta), replace(WINDOW, **attention)
    return replace(config(*cell), **others)


ANYWHERE = [
    (
        config(LAYER, Mamba2Config(inner_size=8, head_dim=4, state_size=4)),
        r"^cell: got a mixer of type 'mamba2', expected 'd",
    ),
    (config(WINDOW), r"^cell: got no mixer of type 'delta', expected at least one$"),
    (
        config(LAYER, replace(LAYER, conv_width=3)),
        r"^cell: got 2 different mixers of type 'delta', expected one: a checkpoint tells",
    ),
    (
        config(LAYER, WINDOW, replace(WINDOW, window=None)),
        r"^cell: got 2 different mixers of type 'attention', expected one: ",
    ),
    (
        hybrid_of({"decay": "head"}, {}),
        r"^decay: got 'head', expected 'channel', as in the layer of others$",
    ),
    (
        hybrid_of({"gates": "tied"}, {}),
        r"^gates: got 'tied', expected 'separate', as in the layer of others$",
    ),
    (hybrid_of({"erase_gate": "mean"}, {}), r"^erase_gate: got 'mean', expected 'channel', as in"),
    (hybrid_of({"write_gate": "mean"}, {}), r"^write_gate: got 'mean', expected 'channel', as in"),
    (
        hybrid_of({"output_gate": "none"}, {}),
        r"^output_gate: got 'none', expected silu, as in the released code, or",
    ),
    (
        hybrid_of({"gate_rank": None}, {}),
        r"^gate_rank: got None, expected a rank, as in the layer of others$",
    ),
    (
        hybrid_of({"gate_rank": 3}, {}),
        r"^gate_rank: got 3, expected 4, the value_head_dim, as in their layer$",
    ),
]
IN_THE_RELEASED_TRUNK = [
    (
        hybrid_of({"erase_range": 2.0}, {}),
        r"^erase_range: got 2\.0, expected 1\.0, as in the released code$",
    ),
    (
        hybrid_of({}, {}, rms_norm_eps=1e-6),
        r"^rms_norm_eps: got 1e-06, expected 1e-05, as in the released",
    ),
    (
        hybrid_of({}, {}, tie_word_embeddings=True),
        r"^tie_word_embeddings: got True, expected False, as in the re",
    ),
    (
        hybrid_of({}, {"num_kv_heads": 1}),
        r"^num_kv_heads: got 1, expected 5, as in the released code$",
    ),
    (
        hybrid_of({}, {"num_heads": 3}),
        r"^num_heads \* head_dim: got 6, expected 10, as in the released code$",
    ),
    (
        hybrid_of({}, {"rotary_base": 5e5}),
        r"^rotary_base: got 500000\.0, expected 10000\.0, as in the relea",
    ),
    (
        config(WINDOW, LAYER),
        r"^cell: got attention, delta, expected a delta mixer first, then attention or n",
    ),
    (
        config(LAYER, LAYER, WINDOW),
        r"^cell: got delta, delta, attention, expected a delta mixer first, th",
    ),
]


@pytest.mark.parametrize(
    ("form", "held", "message"),
    [
        *((form, *case) for form in FORMATS for case in ANYWHERE),
        *(("lit-gpt", *case) for case in IN_THE_RELEASED_TRUNK),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    form: Format, held: ModelConfig, message: str
) -> None:
    with torch.device("meta"):
        model = LanguageModel(held)
    gate: Any = "silu" if form == "fla" else None
    if "output_gate" in message:
        gate = None
    with pytest.raises(ValueError, match=message) as caught:
        foreign_tensors(model, form, output_gate=gate)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [x for x in preset_names() if x.startswith("gdn2-")])
def test_the_released_code_holds_the_papers_models(name: str) -> None:
    if "erase-range" in name or "scalar" in name:
        with pytest.raises(ValueError, match=r"^(erase_range|erase_gate|write_gate): got "):
            check_held(preset(name), "lit-gpt", None)
    else:
        check_held(preset(name), "lit-gpt", None)


def test_a_format_that_is_unknown_is_refused() -> None:
    unknown: Any = "gguf"
    with pytest.raises(ValueError, match=r"^format: got 'gguf', expected lit-gpt or fla$"):
        foreign_tensors(model_for("fla"), unknown)


def test_adapters_are_no_weights_of_a_model() -> None:
    model: Any = model_for("fla")
    wrapped = torch.nn.Module()
    wrapped.base_layer = model.blocks[1].mixer.q_proj
    model.blocks[1].mixer.q_proj = wrapped
    with pytest.raises(
        ValueError,
        match=r"^model: got a parameter blocks\.1\.mixer\.q_proj\.base_layer\.weight, exp",
    ):
        foreign_tensors(model, "fla")


def test_quantised_maps_are_no_weights_of_a_model() -> None:
    model = model_for("fla")
    quantise(model)
    with pytest.raises(
        ValueError,
        match=r"^model: got a parameter blocks\.0\.mixer\.decay_proj\.down\.weight, expec",
    ):
        foreign_tensors(model, "fla")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (config(WINDOW), r"^cell: got no mixer of type 'delta', expected at least one$"),
        (config(replace(LAYER, output_gate="none")), r"^output_gate: got 'none', expected 'silu' "),
    ],
)
def test_only_models_with_the_layer_leave_something_unsaid(held: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unsaid_of(held)


def command(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_writes_what_the_other_reads(tmp_path: Path) -> None:
    model, out = model_for("lit-gpt", WINDOW), tmp_path / "out"
    gdn2.save(model, tmp_path / "m")
    done = command("export", tmp_path / "m", out, "--format", "lit-gpt")
    assert done.exit_code == 0, done.output
    options = "--output-gate silu --head-dim 2 --window 5"
    assert done.output == f"wrote {out}/model.pth, which gdn2 import reads with {options}\n"
    held = torch.load(out / "model.pth", weights_only=True)
    assert held.keys() == {"model"}
    assert held["model"].keys() == official_shapes(True, H).keys()
    done = command("import", out / "model.pth", tmp_path / "again", *options.split())
    assert done.exit_code == 0, done.output
    assert_same(gdn2.load(tmp_path / "again"), model)


def test_a_checkpoint_is_looked_at_wherever_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-00000007"
    gdn2.save(model_for("fla"), checkpoint / "model")  # without the sums of its files
    (tmp_path / "link").symlink_to(checkpoint / "model")
    for place, source in ((checkpoint, "model"), (checkpoint / "model", "."), (tmp_path, "link")):
        monkeypatch.chdir(place)
        refused = command("export", source, tmp_path / "out", "--format", "fla")
        assert refused.exit_code == 2
        assert "step-00000007: got " in refused.output
        assert not (tmp_path / "out").exists()


def test_the_command_writes_safetensors_for_fla(tmp_path: Path) -> None:
    model, out = model_for("fla"), tmp_path / "out"
    gdn2.save(model, tmp_path / "run/checkpoints/step-00000007/model")
    done = command(
        "export", tmp_path / "run/checkpoints/step-00000007/model", out, "--format", "fla"
    )
    assert done.exit_code == 2
    assert "step-00000007: got " in done.output  # a checkpoint without the sums of its files
    gdn2.save(model, tmp_path / "run/model")
    done = command("export", tmp_path / "run", out, "--format", "fla")
    assert done.exit_code == 0, done.output
    assert done.output == f"wrote {out}, which gdn2 import reads with --output-gate sigmoid\n"
    tensors = read_checkpoint(out)
    assert tensors.keys() == fla_shapes(False, H).keys()
    assert_same(import_model(tensors, unsaid_of(model.config)), model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--format", "fla"],
            "output_gate: got silu, expected sigmoid, which fla computes; --outpu",
        ),
        (
            ["--format", "fla", "--output-gate", "sigmoid"],
            "output_gate: got sigmoid, expected silu, ",
        ),
        (["--format", "lit-gpt", "--step", "3"], "step: got 3, expected none: "),
        (
            ["--format", "lit-gpt", "--results", "r.json"],
            "results: got r.json, expected nothing: lit",
        ),
        (
            ["--output-gate", "silu"],
            "output_gate: got silu, expected nothing: the format gdn2 says",
        ),
    ],
)
def test_the_commands_mistakes_write_nothing(
    words: list[str], message: str, tmp_path: Path
) -> None:
    gdn2.save(model_for("lit-gpt"), tmp_path / "run/model")
    place = tmp_path / "run" / ("model" if "--step" in words else "")
    refused = command("export", place, tmp_path / "out", *words)
    assert refused.exit_code == 2
    assert refused.output.startswith(f"error: {message}"), refused.output
    assert refused.output.count("\n") == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    refused = command("export", tmp_path / "run", tmp_path / "out", "--format", "lit-gpt")
    assert "which exists, expected a new one" in refused.output
