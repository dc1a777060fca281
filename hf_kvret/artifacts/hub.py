"""Artifacts on the hub: found and downloaded by huggingface_hub, with its own errors.

Its settings apply: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and the rest.
"""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_kvret.artifacts.files import PATTERNS

# The base class of the HTTP client's errors without a response; the client differs by version.
CLIENT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]


def find_folder(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder with the files of ``source``: itself if it exists, else downloaded or cached.

    All files are of one commit, and those that are in the cache are not downloaded again. A file
    that the repository lacks is missing in the folder. Other arguments and errors as of
    ``CalibrationArtifact.from_pretrained``.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} of {path}, a folder on this machine: only artifacts on the "
                "hub have revisions; leave it out, or start where no folder has the hub id's name"
            )
        return path
    if path.exists():
        raise NotADirectoryError(f"{path} is a file: give the folder that holds the artifact")
    if not isinstance(source, str) or not is_hub_id(source):
        raise FileNotFoundError(
            f"no folder {path}, and it is no hub id either (a string, user/name): check the "
            "spelling"
        )
    return Path(snapshot_download(source, revision=revision, allow_patterns=list(PATTERNS)))


def is_hub_id(text: str) -> bool:
    """Whether ``text`` could be the name of a repository: ``user/name``, or an old ``name``."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
