"""What `gdn2 bench figures` measures for docs/performance.md, what matters most first."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Something to measure by commands of `gdn2 bench` that belong together."""

    name: str
    about: str
    minutes: float  # that it should take: as estimated for an H200, as measured on two cores
    commands: tuple[str, ...]


def _operator(name: str, about: str, options: str, minutes: float) -> Figure:
    """Most of it is fla's tuning."""
    return Figure(name, about, minutes, (f"operator --peers --seconds 0.3 {options}",))


COLD = "first-call"  # whose steps are no speeds
_USUAL = "--shape 4x4096x16x128x128"
_PRODUCTS = "products gdn2-1.3b-hybrid --seconds 0.15"
_TIMED = "--peers --weights bf16,fp32 --no-recompute --steps 5"
_HYBRIDS = ("mamba2", "gdn", "kda", "mamba3-siso")
FIGURES = {
    "cuda": (
        _operator("operator", "The operator at the paper's size", "--suite hopper", 2),
        Figure(
            "training",
            "Training of the 1.3B hybrid",
            6,
            (  # the products that are chosen lie on the machine: taken elsewhere, they are chosen there
                _PRODUCTS,
                f"training gdn2-1.3b-hybrid {_TIMED}",
            ),
        ),
        Figure(
            "training-recurrent",
            "Training of the recurrent 1.3B",
            6,
            (_PRODUCTS, f"training gdn2-1.3b {_TIMED}"),
        ),
        Figure("decode", "One token at a time", 0.6, ("decode --peers",)),
        Figure(
            "kernels",
            "The operator kernel by kernel, and what registers that do not fit cost",
            1,
            (
                "kernels --programs 1",
                "kernels --form kda --programs 1",
                "kernels --form gdn --programs 1",
                "kernels --form mamba2 --shape 4x4096x64x64x64 --programs 1",
                "kernels --value-heads 32 --programs 1",
            ),
        ),
        Figure("accuracy", "Errors against fp64", 0.8, ("accuracy --peers",)),
        Figure(
            COLD,
            "The first call and the first training step, nothing compiled",
            2,
            (
                "operator --shape 4x4096x16x128x128 --seconds 0.3 --cold",
                "training gdn2-1.3b-hybrid --shape 4x4096 --weights bf16 --steps 1 --cold",
            ),
        ),
        Figure(
            "profile",
            "Where a training step goes",
            4,
            ("profile gdn2-1.3b-hybrid --no-recompute --peers",),
        ),
        Figure(
            "generation",
            "Prefill and decoding of the recurrent 1.3B",
            2,
            ("generation gdn2-1.3b --batch 1 --batch 64 --context 1024",),
        ),
        _operator(
            "packed", "32 documents in 16384 tokens", "--shape 1x16384x16x128x128 --packed 32", 5
        ),
        _operator("narrow-heads", "32 heads of width 64", "--shape 4x4096x32x64x64", 3),
        _operator("long", "65536 tokens, 4 heads", "--shape 1x65536x4x128x128", 3),
        _operator("kda", "KDA: one gate a head", f"{_USUAL} --form kda", 2.5),
        _operator("gdn", "Gated DeltaNet: a decay and a gate a head", f"{_USUAL} --form gdn", 1.5),
        _operator(
            "gdn-value-heads",
            "Gated DeltaNet, 32 value heads of 16",
            f"{_USUAL} --form gdn --value-heads 32",
            2,
        ),
        _operator("mamba2", "Mamba-2: no erase gate", "--shape 4x4096x64x64x64 --form mamba2", 2),
        _operator("value-heads", "32 value heads of 16", f"{_USUAL} --value-heads 32", 2.5),
        Figure(
            "models",
            "Training of all models of the paper",
            10,
            tuple(
                f"training {preset} --weights bf16 --steps 3"
                for preset in ("transformer-1.3b", *(f"{name}-1.3b-hybrid" for name in _HYBRIDS))
            )
            + tuple(
                f"training mamba3-mimo-1.3b-hybrid --weights bf16 --steps 3 {shapes}"
                for shapes in ("--shape 8x2048 --shape 4x4096 --shape 2x8192", "--shape 1x16384")
            ),
        ),
    ),
    "cpu": (
        Figure(
            "operator",
            "The operator beside the token loop",
            0.4,
            (
                "operator --shape 1x2048x4x64x64 --backend torch,reference --passes backward"
                " --threads 2 --seconds 6",
            ),
        ),
        Figure(
            "length",
            "Time per token as sequences grow",
            0.3,
            (
                "operator --shape 1x1024x4x64x64 --shape 1x16384x4x64x64 --backend torch"
                " --passes backward --threads 2 --seconds 4",
            ),
        ),
        Figure("kernels", "Where the operator's time goes", 0.1, ("kernels",)),
        Figure("accuracy", "Errors against fp64", 0.1, ("accuracy",)),
        Figure(
            "generation", "Decoding of a small model", 0.2, ("generation gdn2-15m --threads 2",)
        ),
    ),
}
