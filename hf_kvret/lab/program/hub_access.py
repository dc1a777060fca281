"""Whether the hub can be asked, before a command's work: its client tries for half a minute."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import CONFIG_MAPPING

from hf_kvret.artifacts.hub import CLIENT_ERROR, is_hub_id

_TIMEOUT_SECONDS = 10.0


def needs_cache(option: str, name: str) -> bool:
    """Whether the model ``name`` can only be had of the cache, as the hub can't be asked.

    Args:
        option: what the user gave ``name`` to, as ``--model``.

    Raises:
        NotADirectoryError: ``name`` is a file.
        FileNotFoundError: it is neither a folder nor a hub id.
        ConnectionError: it is a hub id, the hub can't be reached, and the cache lacks it.
    """
    if Path(name).is_dir():
        return False
    if Path(name).is_file():
        raise NotADirectoryError(f"{option} {name} is a file: give the folder that holds it")
    if not is_hub_id(name):
        raise FileNotFoundError(
            f"{option} {name}: no such folder, and no hub id either (owner/name); check the "
            "spelling"
        )
    reason = why_unreachable(name)
    if reason is None:
        return False
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    raise ConnectionError(
        f"{option} {name}: no such folder, not in the cache, and the hub can't be asked "
        f"({reason}). Give a local folder, or load it once while online (HF_HUB_OFFLINE unset)"
    )


def check_type(option: str, name: str) -> None:
    """ValueError where the folder ``name`` is of a type that transformers doesn't know."""
    try:
        config = json.loads((Path(name) / "config.json").read_bytes())
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        # Whoever loads it says what is wrong with it.
        return
    if kind not in CONFIG_MAPPING and "auto_map" not in config:
        raise ValueError(f"{option} {name}: {unknown_type(kind)}")


def unknown_type(kind: str) -> str:
    """Words for a type of models that transformers doesn't know."""
    known = f"transformers {transformers.__version__} does not know the type {kind!r}"
    return f"{known}: take a version that has it, or correct the name"


def why_unreachable(repo_id: str) -> str | None:
    """Why the hub can't be asked about a repository; None where it answers, be it with a no."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        HfApi().repo_info(repo_id, timeout=_TIMEOUT_SECONDS)
    except HfHubHTTPError:
        return None
    except (OfflineModeIsEnabled, CLIENT_ERROR) as error:
        return f"{constants.ENDPOINT} does not answer: {error or type(error).__name__}"
    return None
