"""Configs as plain dicts, lists and numbers, and back: what a JSON or TOML file holds.

Every mistake is one line with the path of the value, what it is and what was expected; an unknown name is answered with
the nearest known one.
"""

from collections.abc import Collection, Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from math import inf
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gdn2.ops.arguments import require

C = TypeVar("C")


def to_plain(config: Any) -> dict[str, Any]:
    """Return a config dataclass as nested dicts and lists."""
    return asdict(config, dict_factory=lambda items: {k: _listed(v) for k, v in items})


def from_plain(cls: type[C], data: Any, path: str = "") -> C:
    """Build the config dataclass `cls` from nested dicts; `path` is where the data stand in a larger file."""
    if not isinstance(data, dict):
        raise ValueError(f"{path or 'config'}: got {data!r}, expected a table")
    kinds = get_type_hints(cls)
    prefix = f"{path}." if path else ""
    for name in data:
        if name not in kinds:
            raise ValueError(f"{prefix}{name}: unknown name, expected {nearest(name, kinds)}")
    read = {name: _read(value, kinds[name], prefix + name) for name, value in data.items()}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in read:
            raise ValueError(f"{prefix}{field.name}: missing, expected {_words(kinds[field.name])}")
    try:
        return cls(**read)
    except ValueError as mistake:
        raise ValueError(f"{prefix}{mistake}") from None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables and lists with their dotted paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{i}]")
    else:
        yield path, value


def check_types(config: Any) -> None:
    """Raise ValueError unless every field of a config dataclass is what its annotation says, or a file's way to say it.

    Tables and lists become the configs and tuples they stand for.
    """
    for name, kind in get_type_hints(type(config)).items():
        object.__setattr__(config, name, _read(getattr(config, name), kind, name))  # may be frozen


def at_least_one(config: object, *names: str) -> None:
    """Check numbers that count something."""
    for name in names:
        require(getattr(config, name) >= 1, name, getattr(config, name), "at least 1")


def none_or_at_least_one(config: object, *names: str) -> None:
    """Check numbers that count something where they are given."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= 1, name, value, "None or at least 1")


def positive(config: object, *names: str) -> None:
    """Check quantities."""
    for name in names:
        value = getattr(config, name)
        require(0 < value < inf, name, value, "more than 0 and finite")


def nearest(name: str, known: Collection[str]) -> str:
    """The known names most like this one, or all of them."""
    return " or ".join(get_close_matches(name, known, n=3) or sorted(known))


def _read(value: Any, kind: Any, path: str) -> Any:
    origin, options = get_origin(kind), get_args(kind)
    configs = [option for option in options if is_dataclass(option)]
    match origin:
        case _ if kind in (bool, int, str):
            fits = type(value) is kind
        case _ if kind is float:
            fits = type(value) in (int, float)
        case _ if origin is Literal:
            fits = value in options
        case _ if origin is tuple:
            fits = isinstance(value, list | tuple)
            if fits:
                return tuple(_read(v, options[0], f"{path}[{i}]") for i, v in enumerate(value))
        case _ if isinstance(kind, type) and is_dataclass(kind):
            return value if isinstance(value, kind) else from_plain(kind, value, path)
        case _ if configs and not (value is None and NoneType in options):
            return value if type(value) in configs else _read_tagged(value, configs, path)
        case _ if origin is UnionType:
            if value is None and NoneType in options:
                return value
            (kind,) = (option for option in options if option is not NoneType)
            return _read(value, kind, path)
        case _:
            raise AssertionError(f"{path} is annotated {kind}, which no config may be")
    if not fits:
        raise ValueError(f"{path}: got {value!r}, expected {_words(kind)}")
    return value


def _read_tagged(data: Any, configs: list[Any], path: str) -> Any:
    """Read one of several dataclasses, told apart by their field `type`."""
    known = {get_args(get_type_hints(config)["type"])[0]: config for config in configs}
    tag = data.get("type") if isinstance(data, dict) else None
    if not isinstance(tag, str) or tag not in known:  # a list is no key of a dict
        raise ValueError(f"{path}.type: got {tag!r}, expected one of {', '.join(known)}")
    return from_plain(known[tag], data, path)


def _words(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return "a list"
    return names.get(kind, "a table")


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
