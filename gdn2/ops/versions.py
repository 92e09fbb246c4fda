"""Versions of the packages that take part in what is computed."""

from importlib import metadata

import torch


def installed(package: str) -> str | None:
    """The version of a package, of torch with what it was built for; None where it is not installed."""
    if package == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
