"""Libraries that only some inputs need."""

from importlib import import_module
from typing import Any


def need(module: str, extra: str, what: str) -> Any:
    """Import an optional library, or say in one line how to get it."""
    try:
        return import_module(module)
    except ImportError:
        install = f'pip install "gdn2[{extra}]"'
        raise ValueError(f"{what}: needs the library {module}, expected {install}") from None
