"""The configs that come with the package."""

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"


def config_names() -> list[str]:
    """What `gdn2 train` calls them."""
    return sorted(file.stem for file in CONFIGS.glob("*.toml"))
