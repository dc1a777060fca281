"""Artifacts on a hub: the real client against a server on this machine."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from hf_kvret.artifacts import CalibrationArtifact

from .artifact_folder import FIXED_NAME, files_of

REPO = "alice/a2ats-llama"


@pytest.fixture
def files(saved: Path) -> dict[str, bytes]:
    """The content of a saved artifact."""
    return {path.name: path.read_bytes() for path in saved.iterdir() if path.name[0] != "."}


@pytest.fixture
def other(artifact: CalibrationArtifact) -> CalibrationArtifact:
    return CalibrationArtifact("a2ats", artifact.model, {"x": torch.ones(3)})


def test_an_artifact_comes_from_the_hub_and_then_from_the_cache(
    hub: Any,
    artifact: CalibrationArtifact,
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add(REPO, {**files, "notes.bin": b"not ours"})
    assert CalibrationArtifact.from_pretrained(REPO, method="a2ats").sha256 == artifact.sha256
    assert len(hub.bodies()) == 3
    assert not [line for line in hub.bodies() if "notes.bin" in line]
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    local = CalibrationArtifact.from_pretrained(REPO)
    assert local.sha256 == artifact.sha256 and not hub.requests
    # A download that broke off is not taken for an artifact.
    for path in Path(constants.HF_HUB_CACHE).rglob("artifact-*.safetensors"):
        path.unlink()
    with pytest.raises(FileNotFoundError):
        CalibrationArtifact.from_pretrained(REPO)


def test_branches_and_commits_are_revisions(
    hub: Any,
    artifact: CalibrationArtifact,
    other: CalibrationArtifact,
    files: dict[str, bytes],
    tmp_path: Path,
) -> None:
    first = hub.add(REPO, files)
    other.save_pretrained(tmp_path / "other")
    newer = files_of(tmp_path / "other")
    hub.add(REPO, newer, ref="v2")
    hub.add(REPO, newer)
    for revision, expected in ((None, other), ("v2", other), (first, artifact)):
        loaded = CalibrationArtifact.from_pretrained(REPO, revision=revision)
        assert loaded.sha256 == expected.sha256
    with pytest.raises(RevisionNotFoundError, match="v3"):
        CalibrationArtifact.from_pretrained(REPO, revision="v3")


def test_a_folder_wins_over_a_repository(
    hub: Any, artifact: CalibrationArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, {})
    monkeypatch.chdir(tmp_path)
    artifact.save_pretrained(REPO)
    assert CalibrationArtifact.from_pretrained(REPO).sha256 == artifact.sha256
    assert not hub.requests
    with pytest.raises(ValueError, match=r"revision='v2' of alice/a2ats-llama, a folder"):
        CalibrationArtifact.from_pretrained(REPO, revision="v2")


@pytest.mark.parametrize("missing", ["config.json", "safetensors"])
def test_a_repository_without_an_artifact_is_named(
    hub: Any, files: dict[str, bytes], missing: str
) -> None:
    del files[next(name for name in files if name.endswith(missing))]
    hub.add(REPO, files)
    with pytest.raises(FileNotFoundError, match=f"no calibration artifact in .*{missing}"):
        CalibrationArtifact.from_pretrained(REPO)


def test_an_upload_comes_back_and_the_next_one_replaces_it(
    hub: Any,
    artifact: CalibrationArtifact,
    other: CalibrationArtifact,
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    url = artifact.push_to_hub(REPO, private=True)
    repository = hub.repositories[REPO]
    commit = repository.refs["main"]
    assert url == f"{constants.ENDPOINT}/{REPO}/commit/{commit}"
    assert repository.messages[-1] == "a2ats artifact for meta/tiny-llama"
    assert set(repository.commits[commit]) == {*files, ".gitattributes"}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RepositoryNotFoundError, match=REPO):
        CalibrationArtifact.from_pretrained(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    assert CalibrationArtifact.from_pretrained(REPO).sha256 == artifact.sha256
    card = ModelCard(repository.commits[commit]["README.md"].decode())
    assert f'{{"artifact": "{REPO}"}}' in card.text
    hub.add(REPO, {FIXED_NAME: b"of 0.1.0", "artifact-2.safetensors": b"not ours"})
    other.push_to_hub(REPO)
    assert CalibrationArtifact.from_pretrained(REPO).sha256 == other.sha256
    left = set(repository.commits[repository.refs["main"]])
    assert len(left) == 5 and "artifact-2.safetensors" in left and FIXED_NAME not in left


def test_an_upload_to_a_branch_leaves_main_alone(
    hub: Any, artifact: CalibrationArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    for _ in range(2):  # the branch is made, then found
        artifact.push_to_hub(REPO, revision="v2")
    assert set(hub.repositories[REPO].refs) == {"main", "v2"}
    loaded = CalibrationArtifact.from_pretrained(REPO, revision="v2")
    assert loaded.sha256 == artifact.sha256
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        CalibrationArtifact.from_pretrained(REPO)


@pytest.mark.parametrize(
    ("content", "owner"),
    [(b'{"model_type": "llama"}', "a model"), (b'{"format_version": 1, "method": "aqua"}', "aqua")],
)
def test_a_repository_of_something_else_is_not_written_to(
    hub: Any,
    artifact: CalibrationArtifact,
    content: bytes,
    owner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    hub.add(REPO, {"config.json": content})
    with pytest.raises(ValueError, match=f"config.json of {REPO} is .*{owner}.*a new repo"):
        artifact.push_to_hub(REPO)
    assert len(hub.repositories[REPO].commits) == 1


def test_a_name_that_is_no_hub_id_is_refused(hub: Any) -> None:
    for name in ("alice/a/b", Path("alice/a")):
        with pytest.raises(FileNotFoundError, match=rf"no folder {name}, and it is no hub id"):
            CalibrationArtifact.from_pretrained(name)
    assert not hub.requests


def test_a_name_that_nobody_can_be_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = Mock(side_effect=FileNotFoundError("offline"))
    monkeypatch.setattr("hf_kvret.artifacts.files.snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match="no folder alice/a, and as a hub id: offline"):
        CalibrationArtifact.from_pretrained("alice/a")
