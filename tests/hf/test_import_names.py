"""A user's own trunk around fla's layer: what is called otherwise is named, and mistakes are one line."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

import gdn2
from gdn2.cli import app
from gdn2.hf.importing import import_model
from gdn2.hf.recognising import read_names
from tests.hf.foreign import FLA, Tensors, around_fla, assert_same, hybrid

OWN = {  # names of somebody's trunk, by what `around_fla` calls them
    "model.embeddings.weight": "backbone.tok_emb.weight",
    "model.norm.weight": "norm_f.scale",
    "lm_head.weight": "backbone.unembed.weight",
    "model.layers.": "backbone.stack.",
    ".attn_norm.weight": ".norm1.scale",
    ".mlp_norm.weight": ".norm2.scale",
    ".mlp.gate_proj.": ".ffn.w1.",
    ".mlp.up_proj.": ".ffn.w3.",
    ".mlp.down_proj.": ".ffn.w2.",
    ".attn.": ".gdn.",
}
WORDS = [
    "embedding=backbone.tok_emb",  # a whole name, without .weight
    "norm=norm_f.scale",
    "head=unembed",  # beside the blocks
    "mixer_norm=norm1.scale",
    "mlp_norm=norm2.scale",
    "mlp.gate_proj=ffn.w1.weight",
    "mlp.up_proj=ffn.w3",
    "mlp.down_proj=ffn.w2",
    "attention.q_proj=sdpa.wq",
    "attention.k_proj=sdpa.wk",
    "attention.v_proj=sdpa.wv",
    "attention.out_proj=sdpa.wo",
]


def own_trunk() -> Tensors:
    """A hybrid whose blocks 1 and 3 are attention."""
    found = {}
    for name, x in around_fla(hybrid(output_gate="sigmoid")).items():
        for old, new in OWN.items():
            name = name.replace(old, new)  # noqa: PLW2901
        if ".1.gdn." in name or ".3.gdn." in name:
            name = name.replace(".gdn.", ".sdpa.w").replace("_proj", "")  # noqa: PLW2901
        found[name] = x.contiguous()
    return found


def import_with(words: list[str], tensors: Tensors) -> gdn2.LanguageModel:
    return import_model(tensors, replace(FLA, names=read_names(words)))


def test_a_trunk_of_any_names_comes_back(tmp_path: Path) -> None:
    tensors, model = own_trunk(), hybrid(output_gate="sigmoid")
    assert {"backbone.stack.1.sdpa.wq.weight", "backbone.stack.0.gdn.A_log"} <= tensors.keys()
    assert_same(import_with(WORDS, tensors), model)
    save_file(tensors, tmp_path / "own.safetensors")
    command = ["import", str(tmp_path / "own.safetensors"), str(tmp_path / "m")]
    command += ["--head-dim", "2", "--window", "5", "--output-gate", "sigmoid"]
    refused = CliRunner().invoke(app, [*command, "--name", "embedding=backbone.tok_embs"])
    assert refused.exit_code == 2
    assert refused.output == (
        "error: name: got embedding=backbone.tok_embs, expected a tensor's name, "
        "such as backbone.tok_emb.weight\n"
    )
    assert not (tmp_path / "m").exists()
    done = CliRunner().invoke(app, [*command, *(x for word in WORDS for x in ("--name", word))])
    assert done.exit_code == 0, done.output
    assert_same(gdn2.load(tmp_path / "m"), model)


def test_a_digit_at_a_names_end_is_no_blocks_number() -> None:
    tensors = {name.replace("model.", "gpt2."): x for name, x in around_fla(hybrid()).items()}
    assert_same(import_model(tensors, replace(FLA, output_gate="silu")), hybrid())


@pytest.mark.parametrize("own", ["attn.q_proj", "attn.wq"])
def test_maps_of_attention_may_end_in_one_called_as_beside_fused_ones(own: str) -> None:
    tensors = around_fla(hybrid())
    for i in (1, 3):
        for theirs, other in (("attn.q_proj", own), ("attn.o_proj", "attn.proj")):
            moved = tensors.pop(f"model.layers.{i}.{theirs}.weight")
            tensors[f"model.layers.{i}.{other}.weight"] = moved
    names = {"attention.out_proj": "attn.proj", "attention.q_proj": own}
    unsaid = replace(FLA, output_gate="silu")
    assert_same(import_model(tensors, replace(unsaid, names=names)), hybrid())
    if own == "attn.q_proj":
        with pytest.raises(ValueError, match=r"--name attention\.out_proj=… would help$"):
            import_model(tensors, unsaid)


@pytest.mark.parametrize("place", range(len(WORDS)))
def test_the_option_for_a_role_that_is_missing_is_named(place: int) -> None:
    role = WORDS[place].partition("=")[0]
    with pytest.raises(ValueError, match=r"^checkpoint: got no .* and unexpected ") as caught:
        import_with(WORDS[:place] + WORDS[place + 1 :], own_trunk())
    ending = f"; --name {role}=…{' or --tied' if role == 'head' else ''} would help"
    assert str(caught.value).endswith(ending)


def test_all_options_that_would_help_are_named() -> None:
    with pytest.raises(ValueError, match=r"^checkpoint: got no ") as caught:
        import_with(WORDS[2:], own_trunk())
    line = str(caught.value)
    assert line == (
        "checkpoint: got no backbone.embeddings.weight, backbone.norm.weight "
        "and unexpected backbone.tok_emb.weight, norm_f.scale, "
        "expected the tensors of its blocks and no others; "
        "--name embedding=… and --name norm=… would help"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["embeding=x"], r"^name: got embeding=x, expected embedding before =$"),
        (["norm"], r"^name: got 'norm', expected role=name, such as embedding=backbone\.tok_emb$"),
        (["norm="], r"^name: got 'norm=', expected role=name, such as"),
        (["norm=a", "norm=b"], r"^name: got norm twice, expected one name for it$"),
        (["head=zzz"], r"^name: got head=zzz, expected a tensor's name$"),
        (
            ["mixer_norm=norm1.scal"],
            r"^name: got mixer_norm=norm1\.scal, expected a tensor's name behind backbone\.stack\.0\."
            r", such as norm1\.scale$",
        ),
        (
            ["attention.q_proj=sdpa.q"],
            r"^name: got attention\.q_proj=sdpa\.q, .* behind backbone\.stack\.1\., such as sdpa\.w",
        ),
        (
            [*WORDS[:4], "mlp_norm=norm1.scale", *WORDS[5:]],
            r"^checkpoint: got backbone\.stack\.0\.norm1\.scale, backbone\.stack\.1\.norm1\.scale, "
            r"backbone\.stack\.2\.norm1\.scale and 1 more for two parts, expected a tensor for each$",
        ),
    ],
)
def test_wrong_names_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        import_with(words, own_trunk())
    assert "\n" not in str(caught.value)


def test_what_the_model_does_not_have_has_no_name() -> None:
    tensors = own_trunk()
    with pytest.raises(ValueError, match=r"^name: got head=unembed, expected one of embedding, n"):
        import_model(tensors, replace(FLA, names={"head": "unembed"}, tied=True))
    recurrent = {
        name.replace("stack.2.", "stack.1."): x
        for name, x in tensors.items()
        if "stack.1." not in name and "stack.3." not in name
    }
    assert len(import_with(WORDS[:8], recurrent).blocks) == 2
    with pytest.raises(ValueError, match=r"^name: got attention\.q_proj=q, expected one of embed"):
        import_with([*WORDS[:8], "attention.q_proj=q"], recurrent)
