"""Run configs as files: TOML with presets and dotted overrides, and what may differ when a run goes on."""

import json
import tomllib
from collections.abc import Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any

from gdn2.data.config import at_home
from gdn2.data.content import digests
from gdn2.layers.plain import from_plain, leaves, nearest, to_plain
from gdn2.models.files import read_json, replace_file
from gdn2.models.presets import preset
from gdn2.models.run_folder import WRITTEN, is_run, is_saved
from gdn2.ops.arguments import require
from gdn2.training.config import RunConfig
from gdn2.training.embedded import CONFIGS, config_names
from gdn2.training.first_weights import INIT_FROM, model_in, weights_digest

DIGESTS = "data.json"  # of what the run was started with
# What changes neither weights nor data: a resumed run may have other values.
FREE = (
    *("run.dir", "batch.micro_rows"),
    *("engine", "parallel", "checkpoint", "validation", "samples", "log"),
)


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in a file, or the embedded one of this name, with `section.key=value` put over it."""
    require(not isinstance(overrides, str), "overrides", repr(overrides), "a list of them")
    file = Path(name)
    if not file.is_file():
        file = CONFIGS / f"{name}.toml"
    if not file.is_file():
        known = nearest(str(name), config_names())
        raise ValueError(f"config: got {str(name)!r}, expected a file or {known}")
    table = _read(file)
    for override in overrides:
        _put(table, override)
    return config_from(table)


def config_from(table: dict[str, Any]) -> RunConfig:
    """Read nested tables; `model.preset` stands for all values of that preset, which those beside it replace.

    A model that is left out, or none, is that of `run.init_from`.
    """
    model = table.get("model")
    if isinstance(model, dict) and "preset" in model:
        own = {key: value for key, value in model.items() if key != "preset"}
        name = model["preset"]
        require(isinstance(name, str), "model.preset", repr(name), "a string")
        try:
            table = {**table, "model": {**preset(name).to_dict(), **own}}
        except ValueError as mistake:
            raise ValueError(f"model.{mistake}") from None
    if model is None:
        table = _with_first_model(table)
    return from_plain(RunConfig, table)


def write_config(config: RunConfig, folder: Path) -> None:
    """Write down what a run was started with; the config first, by which a folder is known as a run's after a kill."""
    for name, record in ((WRITTEN, to_plain(config)), (DIGESTS, _digests(config, folder))):
        replace_file(folder / name, json.dumps(record, indent=2) + "\n")


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Raise ValueError if the run in a folder was started with another config, apart from what may differ.

    Data are known by what they hold: they may have moved, but not changed where they are. So are first weights, which
    are only looked at where they are said to have moved. What the folder's config does not say has its default.
    """
    before = _values(config_from(read_json(folder / WRITTEN)))
    now = _values(config)
    held, holds = _recorded(folder), digests(config.data)
    first = config.run.init_from
    if INIT_FROM in held and first not in (None, before.get(INIT_FROM)):
        holds[INIT_FROM] = weights_digest(first)
    for name in sorted(filterfalse(_is_free, before.keys() | now.keys())):
        key = name.removeprefix("data.")
        if key in held.keys() & holds.keys():
            if held[key] != holds[key]:
                raise ValueError(
                    f"{name}: got {now[name]!r}, which holds other data than those of the run in {folder}; "
                    "a new run needs another run.dir"
                )
        elif before.get(name) != now.get(name):
            raise ValueError(
                f"{name}: got {now.get(name)!r}, expected {before.get(name)!r}, with which the run in {folder} "
                f"was started; only {', '.join(FREE)} may differ, a new run needs another run.dir"
            )


def _with_first_model(table: dict[str, Any]) -> dict[str, Any]:
    """A run that goes on has its model written down: the folder it began with may be gone."""
    match table.get("run"):
        case {"dir": str(place), "init_from": str(first)}:
            folder = Path(at_home(place))
        case _:
            return table
    if is_run(folder) and is_saved(folder):
        return {**table, "model": read_json(folder / WRITTEN).get("model")}
    return {**table, "model": model_in(at_home(first)).to_dict()}


def _digests(config: RunConfig, folder: Path) -> dict[str, str]:
    """What data and first weights hold; of the latter, what was written down when the run began."""
    found, first = digests(config.data), config.run.init_from
    if is_saved(folder):
        return found | {name: x for name, x in _recorded(folder).items() if name == INIT_FROM}
    return found if first is None else found | {INIT_FROM: weights_digest(first)}


def _recorded(folder: Path) -> dict[str, Any]:
    return read_json(folder / DIGESTS) if (folder / DIGESTS).exists() else {}


def _read(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        return read_json(file)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise ValueError(f"{file}: got {reason}, expected TOML") from None


def _put(table: dict[str, Any], override: str) -> None:
    """Set the value that section.key=value names; `none` is no value, which TOML has no word for."""
    path, equals, text = override.partition("=")
    *sections, key = path.strip().split(".")
    if not equals or not key or not all(sections):
        raise ValueError(f"override: got {override!r}, expected section.key=value")
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ValueError(f"override: got {override!r}, but {section} is no table")
        table = inner
    table[key] = _value(text.lstrip())


def _value(text: str) -> Any:
    """A TOML value; what is none is a string, so that paths and names need no quotes in a shell."""
    if text.strip() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _values(config: RunConfig) -> dict[str, Any]:
    """All values of a config by their dotted paths, as JSON has them."""
    return dict(leaves(json.loads(json.dumps(to_plain(config)))))


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE)
