"""Artifacts on the hub: found, downloaded and uploaded by huggingface_hub alone.

So its settings apply: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and the rest.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    is_offline_mode,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from hf_kvret.artifacts.files import DESCRIPTION, HUB_FILES, PATTERNS, check_description
from hf_kvret.version import __version__

# The base class of the HTTP client's errors without a response; the client differs by version.
CLIENT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_LOG_IN = (
    "log in with huggingface_hub.login() or `hf auth login`, set HF_TOKEN, or pass token= "
    "(a token that may {do} it)"
)


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
    repo_id = os.fspath(source)
    if not isinstance(source, str):
        raise FileNotFoundError(f"no folder {path}: check the spelling; pass a hub id as a string")
    if not is_hub_id(repo_id):
        raise FileNotFoundError(
            f"no folder {path}, and it is no hub id either (user/name): check the spelling"
        )
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            allow_patterns=[str(Path(subfolder, pattern)) for pattern in PATTERNS],
            library_name="hf-kvret",
            library_version=__version__,
        )
    except GatedRepoError as error:
        raise PermissionError(
            f"{repo_id} is gated: ask for access on {constants.ENDPOINT}/{repo_id}, then "
            f"{_LOG_IN.format(do='read')}"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no folder {path}, and no repository {repo_id} on {constants.ENDPOINT}, or a private "
            f"one: check the spelling; for a private one {_LOG_IN.format(do='read')}"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} has no revision {revision or constants.DEFAULT_REVISION!r}: see "
            f"{constants.ENDPOINT}/{repo_id}/tree/main for its branches and tags"
        ) from error
    except LocalEntryNotFoundError as error:
        reason = "no request is allowed (offline)"
        if not (local_files_only or is_offline_mode()):
            reason = f"{constants.ENDPOINT} does not give it ({error.__cause__ or error})"
        raise FileNotFoundError(
            f"no folder {path}; {repo_id} (revision {revision or constants.DEFAULT_REVISION}) is "
            f"not complete in the cache, and {reason}: load it once while online (HF_HUB_OFFLINE "
            "unset, local_files_only=False), or give the cache_dir that holds it"
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise PermissionError(
            f"{constants.ENDPOINT} refuses the token for {repo_id}: {_LOG_IN.format(do='read')}"
        ) from error
    return Path(folder, subfolder)


def cached_commit(repo_id: str) -> str | None:
    """The commit of ``main`` that a model is cached of; None where it does not come from the hub.

    The name of a folder that is gone may look like a hub id, and has no model in the cache.
    """
    path = try_to_load_from_cache(repo_id, DESCRIPTION) if is_hub_id(repo_id) else None
    return Path(path).parent.name if isinstance(path, str) else None


def check_repository(
    repo_id: str,
    method: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> None:
    """Refuse a repository where an artifact of ``method`` would overwrite foreign files.

    Reads its ``config.json``, from ``main`` if there is no branch ``revision`` yet. A repository
    that does not exist, or is hidden from this token, passes: the upload creates or refuses it.

    Raises:
        ConnectionError: the hub can't be reached, or ``HF_HUB_OFFLINE`` is set.
        PermissionError: the token is not valid.
        ValueError: as ``check_description``.
    """
    api = HfApi(token=token, library_name="hf-kvret", library_version=__version__)
    # A cached copy may be older than the file that would be replaced, so none is taken.
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = api.hf_hub_download(repo_id, DESCRIPTION, revision=revision, local_dir=folder)
        except RevisionNotFoundError:
            if revision is not None:
                check_repository(repo_id, method, token=token)
            return
        except LocalEntryNotFoundError as error:
            raise ConnectionError(
                f"{constants.ENDPOINT} does not tell what is in {repo_id} "
                f"({error.__cause__ or error}): upload while online (HF_HUB_OFFLINE unset)"
            ) from error
        except (EntryNotFoundError, RepositoryNotFoundError):
            return
        except HfHubHTTPError as error:
            if error.response.status_code not in (401, 403):
                raise
            raise PermissionError(
                f"{constants.ENDPOINT} refuses the token for {repo_id}: "
                f"{_LOG_IN.format(do='write')}"
            ) from error
        content = Path(path).read_bytes()
    place = f"{DESCRIPTION} of {repo_id} on {constants.ENDPOINT}"
    way_out = f"give a new repository, for instance USER/MODEL-{method}"
    check_description(content, method, place, way_out)


def upload_folder(
    folder: Path,
    repo_id: str,
    method: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str,
    create_pr: bool = False,
) -> str:
    """Upload the files of ``folder``, an artifact of ``method``, in one commit; returns its URL, or
    that of the pull request.

    Arguments and errors as of ``CalibrationArtifact.push_to_hub``.
    """
    if create_pr and revision not in (None, constants.DEFAULT_REVISION):
        raise ValueError(
            f"create_pr=True with revision={revision!r}: the hub opens pull requests against main "
            "only; leave one of the two out"
        )
    api = HfApi(token=token, library_name="hf-kvret", library_version=__version__)
    operations = [CommitOperationAdd(name, str(folder / name)) for name in HUB_FILES]
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        check_repository(repo_id, method, revision=revision, token=token)
        # A pull request that is open has a branch of its own, refs/pr/<number>.
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise PermissionError(
            f"{constants.ENDPOINT} refuses to write {repo_id}: {_LOG_IN.format(do='write')}"
        ) from error
    except (OfflineModeIsEnabled, CLIENT_ERROR) as error:
        raise ConnectionError(
            f"{constants.ENDPOINT} can't be reached, and nothing was uploaded to {repo_id} "
            f"({error}): keep the artifact with artifact.save_pretrained('FOLDER'), and once "
            "online (HF_HUB_OFFLINE unset) push it, CalibrationArtifact.from_pretrained('FOLDER')"
            f".push_to_hub({repo_id!r})"
        ) from error
    return commit.pr_url or commit.commit_url


def is_hub_id(text: str) -> bool:
    """Whether ``text`` could be the name of a repository: ``user/name``, or an old ``name``."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
