"""Artifacts on the hub: found and downloaded by huggingface_hub, with its own errors.

Its settings apply: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and the rest.
"""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_kvret.artifacts.files import DESCRIPTION, PATTERNS

# The base class of the HTTP client's errors without a response; the client differs by version.
CLIENT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]


def find_folder(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
) -> Path:
    """The folder with the files of ``source``: itself if it exists, else downloaded or cached.

    All files are of one commit, and those that are in the cache are not downloaded again. A file
    that the repository lacks is missing in the folder. With ``subfolder`` it is that folder of the
    repository, which may be missing too. Other arguments and errors as of
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
    folder = snapshot_download(
        source,
        revision=revision,
        cache_dir=cache_dir,
        token=token,
        local_files_only=local_files_only,
        allow_patterns=[str(Path(subfolder, pattern)) for pattern in PATTERNS],
    )
    return Path(folder, subfolder)


def cached_commit(repo_id: str) -> str | None:
    """The commit of ``main`` that a model is cached of; None where it does not come from the hub.

    The name of a folder that is gone may look like a hub id, and has no model in the cache.
    """
    path = try_to_load_from_cache(repo_id, DESCRIPTION) if is_hub_id(repo_id) else None
    return Path(path).parent.name if isinstance(path, str) else None


def is_hub_id(text: str) -> bool:
    """Whether ``text`` could be the name of a repository: ``user/name``, or an old ``name``."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
