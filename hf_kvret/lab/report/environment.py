"""Where a number was measured: machine, versions, command."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hf_kvret.version import __version__


def describe_environment() -> dict[str, Any]:
    """Command, machine and versions, for the JSON beside every table."""
    return {
        "command": shlex.join([*program().split(), *map(_without_folder, sys.argv[1:])]),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {
            "hf-kvret": __version__,
            **{name: _version(name) for name in ("torch", "transformers", "triton")},
        },
    }


def _without_folder(word: str) -> str:
    """``word``, of an absolute path its name: results are shared, and folders are of a machine."""
    return Path(word).name if Path(word).is_absolute() else word


def program() -> str:
    """The program that runs: ``hf-kvret``, or ``python`` and a script's path."""
    path = Path(sys.argv[0])
    if path.parent.parent.name == "examples":
        return f"python examples/{path.parent.name}/{path.name}"
    return "hf-kvret" if path.name == "cli.py" else path.name


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
