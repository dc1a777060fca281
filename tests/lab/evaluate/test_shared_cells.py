"""Processes that a launcher started share the cells of an evaluation: each has its own file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.report.results import Results, files_of, rank_file, shared_file
from hf_kvret.models.ranks import launched_part, local_rank

NIAH = ["eval", "niah", "--model", "needle", "--context", "256,384", "--depths", "0,100"]
CACHES = ["--caches", "full,flat,paris", "--samples", "1"]


def run(path: Path, *more: str) -> int:
    return main([*NIAH, *CACHES, "--json", str(path), *more])


def cells_in(path: Path) -> list[str]:
    return [json.dumps(entry["cell"]) for entry in json.loads(path.read_text())["cells"]]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def enter(rank: int | None, ranks: int = 2) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", ranks)):
            if rank is None:
                monkeypatch.delenv(name)
            else:
                monkeypatch.setenv(name, str(value))

    return enter


def test_ranks_share_the_cells_and_one_process_reads_them(
    as_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "niah.json"
    for rank in (1, 0):
        as_rank(rank)
        assert run(path) == 0
    first, second = (cells_in(rank_file(path, rank)) for rank in (0, 1))
    assert len(first) == len(second) and not {*first} & {*second}
    assert not path.exists()
    capsys.readouterr()
    # The same again measures nothing, on a rank and in one process, which prints all.
    assert run(path) == 0
    assert cells_in(rank_file(path, 0)) == first
    as_rank(None)
    assert run(path, "--table", str(tmp_path / "table.md")) == 0
    said = capsys.readouterr().out
    assert f"{len(first) * 2} cells were finished already" in said and "not finished" not in said
    assert (tmp_path / "table.md").read_text().count("| paris") == 1
    alone = tmp_path / "alone.json"
    assert run(alone) == 0
    merged, expected = ({json.dumps(c): r for c, r in Results.load(p)} for p in (path, alone))
    assert merged.keys() == expected.keys() == {*first, *second}


def test_files_of_ranks_make_one_page(as_rank: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for rank in (0, 1):
        as_rank(rank)
        run(tmp_path / "niah.json")
    as_rank(None)
    assert main(["report", str(tmp_path)]) == 0
    assert sorted(page.name for page in tmp_path.glob("*.md")) == ["niah.md", "overview.md"]
    page = (tmp_path / "niah.md").read_text()
    assert "niah.rank0.json" in page and "niah.rank1.json" in page
    assert main(["inspect", "--verify", str(tmp_path)]) == 0


def test_a_file_of_another_set_up_is_not_merged(
    as_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(0)
    run(tmp_path / "niah.json")
    as_rank(1)
    assert run(tmp_path / "niah.json", "--seed", "7") == 2
    assert "niah.rank0.json was made with another set-up (seed was 42, now 7)" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("more", [["--plot", "x.png"], ["--table", "x.md"], []])
def test_a_rank_needs_a_file_and_writes_no_page(
    more: list[str], as_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(1)
    place = ["--json", str(tmp_path / "x.json")] if more else []
    assert main([*NIAH, *CACHES, *place, *more]) == 2
    assert "rank 1 of 2, which share the cells: give --json FILE" in capsys.readouterr().err


def test_ranks_don_t_spread_their_models(
    as_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(0)
    assert run(tmp_path / "x.json", "--device-map", "auto") == 2
    assert "--device-map on rank 0 of 2" in capsys.readouterr().err


def test_numbers_stand_where_another_file_has_a_failure(tmp_path: Path) -> None:
    path, cell = tmp_path / "x.json", {"cache": "flat"}
    numbers, failure = {"score": 1.0}, {"check_failed": "wrong"}
    for first, second in ((failure, numbers), (numbers, failure)):
        for file, row in ((rank_file(path, 0), first), (rank_file(path, 1), second)):
            file.unlink(missing_ok=True)
            own = Results("eval x", {}, file)
            own._others.clear()
            own.add(cell, row)
        assert [row for _, row in Results.load(path)] == [numbers]
        assert Results("eval x", {}, path).find(cell) == numbers
        for rank in (0, 1):
            assert Results("eval x", {}, rank_file(path, rank)).find(cell) == numbers


def test_slurm_names_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step; a batch script outside of one is alone."""
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert launched_part().is_whole
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert launched_part() == (2, 4) and local_rank() == 1
    monkeypatch.setenv("SLURM_PROCID", "4")
    with pytest.raises(ValueError, match=re.escape("SLURM_STEP_NUM_TASKS=4 with SLURM_PROCID='4'")):
        launched_part()


def test_names_of_files(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    assert rank_file(path, 3).name == "a[1].rank3.json"
    assert shared_file(rank_file(path, 12)) == path and shared_file(path) == path
    others = [tmp_path / name for name in ("a[1].rankx.json", "a1.rank0.json", "b.rank0.json")]
    for file in (path, rank_file(path, 0), rank_file(path, 10), *others):
        file.touch()
    assert files_of(rank_file(path, 0)) == [path, rank_file(path, 0), rank_file(path, 10)]
    bare = tmp_path / "bare"
    rank_file(bare, 1).touch()
    assert shared_file(rank_file(bare, 1)) == bare and files_of(bare) == [rank_file(bare, 1)]


def test_weights_on_a_disk_tell_the_same_model(tmp_path: Path) -> None:
    """Its fingerprint does not depend on where they are."""
    pytest.importorskip("accelerate")
    one = load_subject("needle")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers": "disk", "lm_head": "disk"}
    folder = one.model.config._name_or_path
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=tmp_path
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    spread = replace(one, model=model)
    assert spread.describe() == one.describe()
    assert spread.device == torch.device("cpu")


def test_a_spread_model_gives_the_same_answers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run(tmp_path / "one.json") == 0
    assert run(tmp_path / "spread.json", "--device-map", "auto") == 0
    one, spread = ([*Results.load(tmp_path / f"{x}.json")] for x in ("one", "spread"))
    assert [cell for cell, _ in one] == [cell for cell, _ in spread]
    assert [row["answers"] for _, row in one] == [row["answers"] for _, row in spread]


def test_a_spread_model_is_calibrated(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    sizes = ["--tokens", "2K", "--length", "512", "--codewords", "16", "--rounds", "2"]
    command = ["calibrate", "a2ats", "--model", "needle", *sizes, "--no-compare"]
    found = []
    for name, more in (("one", []), ("spread", ["--device-map", "auto"])):
        assert main([*command, "--out", str(tmp_path / name), *more]) == 0
        found.append(CalibrationArtifact.from_pretrained(tmp_path / name).tensors)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_a_spread_model_takes_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hf_kvret.lab.evaluate.subject.is_accelerate_available", lambda: False)
    assert run(tmp_path / "x.json", "--device-map", "auto") == 2
    assert "--device-map needs accelerate: pip install accelerate" in capsys.readouterr().err
