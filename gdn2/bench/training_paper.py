"""What the paper reports of training speed: its figure "Training throughput on a H100 GPU"."""

SHAPES = ("8x2048", "4x4096", "2x8192", "1x16384")  # batch × length, 16k tokens a step

# Thousands of tokens a second at each shape. All but the Transformer are hybrids.
_FIGURE = {
    "transformer-1.3b": (45.83, 42.29, 36.72, 29.36),
    "mamba2-1.3b-hybrid": (44.42, 43.46, 43.30, 43.26),
    "mamba3-siso-1.3b-hybrid": (44.34, 42.94, 42.28, 40.72),
    "mamba3-mimo-1.3b-hybrid": (34.44, 31.90, 29.37, 26.86),
    "gdn-1.3b-hybrid": (41.85, 40.86, 40.02, 39.49),
    "kda-1.3b-hybrid": (39.81, 38.98, 38.85, 38.50),
    "gdn2-1.3b-hybrid": (38.00, 37.25, 36.87, 36.11),
}
PRESETS = tuple(_FIGURE)


def paper_speed(preset: str, shape: str) -> float | None:
    """Tokens a second on one H100, where the paper has this model at this shape."""
    if preset not in _FIGURE or shape not in SHAPES:
        return None
    return 1e3 * _FIGURE[preset][SHAPES.index(shape)]
