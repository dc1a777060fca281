"""Workflows call scripts that exist, with few rights and for a limited time."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
# "run" makes an environment for .ci/check, and a workflow has made one; "gpu" wants a GPU.
BY_HAND = {"run", "gpu"}
CALLED = "./.github/workflows/script.yml"
# GitHub stops a job after six hours.
MOST_MINUTES = 360


def load(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    # YAML 1.1 reads the key ``on`` as True.
    return {"on" if key is True else key: value for key, value in content.items()}


WORKFLOWS = {path.name: load(path) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
JOBS = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
CALLS = [job for job in JOBS if "uses" in job]


def cases(job: dict[str, Any]) -> list[dict[str, str]]:
    """What a job passes to the workflow of one script, a dict for each script."""
    if "strategy" not in job:
        return [job["with"]]
    include: list[dict[str, str]] = job["strategy"]["matrix"]["include"]
    assert not re.findall(r"matrix\.(?!script|apt|python|keep)", str(job["with"]))
    return include


def test_each_script_is_executable_and_in_a_workflow() -> None:
    scripts = {path.name for path in (ROOT / ".ci").glob("[a-z]*") if not path.suffix}
    assert {case["script"] for job in CALLS for case in cases(job)} == scripts - BY_HAND
    assert not [name for name in scripts if not os.access(ROOT / ".ci" / name, os.X_OK)]


def test_a_call_passes_what_the_called_workflow_takes() -> None:
    inputs = WORKFLOWS[Path(CALLED).name]["on"]["workflow_call"]["inputs"]
    assert {job["uses"] for job in CALLS} == {CALLED}
    assert all({"script"} <= case.keys() <= inputs.keys() for job in CALLS for case in cases(job))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_only_reads_and_runs_once_for_a_branch(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    assert not [job for job in workflow["jobs"].values() if "permissions" in job]
    assert ("concurrency" in workflow) == ("workflow_call" not in workflow["on"])


def test_a_job_has_a_limit_and_pinned_actions() -> None:
    jobs = [job for job in JOBS if job not in CALLS]
    assert jobs
    for job in jobs:
        assert job["timeout-minutes"] < MOST_MINUTES
        assert "latest" not in job["runs-on"]
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used and all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


def test_hooks_are_lines_of_the_check() -> None:
    """Where .ci/check passes the whole tree, a hook passes files."""
    check = (ROOT / ".ci" / "check").read_text(encoding="utf-8")
    [local] = load(ROOT / ".pre-commit-config.yaml")["repos"]
    for hook in local["hooks"]:
        assert hook["entry"].partition(" --")[0] in check
