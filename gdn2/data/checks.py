"""Checks of arguments: each mistake is one line that names the argument, its value and what was expected."""


def require(fits: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError unless the value fits."""
    if not fits:
        raise ValueError(f"{name}: got {value!r}, expected {expected}")


def require_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless the value is an integer of at least `least`."""
    fits = type(value) is int and value >= least
    require(fits, name, value, f"an integer of at least {least}")
