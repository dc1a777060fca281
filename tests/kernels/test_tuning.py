"""Launch choices: from files, by size and GPU family, and nothing but a look-up at a launch."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret_kernels import tuning
from hf_kvret_kernels._dispatch import interpreted
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.prompt_attention import prompt_attention

pytest.importorskip("triton", reason="the kernels need triton, which comes with torch on Linux")
from hf_kvret_kernels.gather_attention import triton as gather
from hf_kvret_kernels.gather_scores import triton as scoring
from hf_kvret_kernels.gather_scores.triton import CHOICES, ScoresChoice, ScoresSize
from hf_kvret_kernels.prompt_attention import triton as prompt

CPU = torch.device("cpu")
SIZE = ScoresSize("float16", 16, 2, 4, 32, "device")
RULE = scoring.rule(SIZE)
OTHER = ScoresChoice(block_k=128, warps=2)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of choices for this test alone, and none that are shipped."""
    monkeypatch.setenv("HF_KVRET_TUNING", str(tmp_path / "mine"))
    monkeypatch.setattr(tuning, "_PACKAGE_FOLDER", tmp_path / "shipped")
    tuning.reload()
    yield tmp_path
    tuning.reload()


def write(path: Path, *entries: tuning.Entry) -> None:
    tuning.write_entries(path, "interpreter", entries, tuning.operations())


def mine() -> Path:
    return tuning.user_file("interpreter")


def found(size: ScoresSize = SIZE) -> ScoresChoice:
    return tuning.choice(CHOICES, size, RULE, CPU)


def test_lengths_are_rounded_up_to_powers_of_two() -> None:
    rounded = [tuning.power_of_two(count) for count in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)]
    assert rounded == [0, 1, 2, 4, 4, 8, 1024, 1024, 2048]
    with pytest.raises(ValueError, match="count=-1: at least 0"):
        tuning.power_of_two(-1)


@pytest.mark.parametrize(
    ("name", "capability", "family"),
    [
        ("NVIDIA H200", (9, 0), "sm90-h200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "sm90-h100"),
        ("NVIDIA H100 PCIe", (9, 0), "sm90-h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "sm80-a100-sxm4"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "sm89-rtx-4090"),
        ("Tesla T4", (7, 5), "sm75-t4"),
    ],
)
def test_a_family_is_capability_and_name_without_memory(
    name: str, capability: tuple[int, int], family: str
) -> None:
    assert tuning.family_of(name, *capability) == family


def test_without_files_the_rule_holds() -> None:
    assert not mine().exists()
    assert found() is RULE


def test_what_was_written_is_found_at_its_size_alone() -> None:
    write(mine(), tuning.Entry(CHOICES, SIZE, OTHER, {"ratio": 1.2}))
    assert found() == OTHER
    assert found(SIZE._replace(chosen=64)) is RULE
    assert found(SIZE._replace(rows="host")) is RULE
    [entry] = json.loads(mine().read_text())["entries"]
    assert entry["measured"] == {"ratio": 1.2} and entry["choice"] == {"block_k": 128, "warps": 2}


def test_writing_keeps_other_sizes_and_replaces_the_same() -> None:
    other = SIZE._replace(group=8)
    write(mine(), tuning.Entry(CHOICES, SIZE, OTHER), tuning.Entry(CHOICES, other, OTHER))
    newer = ScoresChoice(block_k=16, warps=8)
    write(mine(), tuning.Entry(CHOICES, SIZE, newer))
    assert (found(), found(other)) == (newer, OTHER)
    assert not list(mine().parent.glob("*.new"))


def test_the_users_file_stands_before_the_shipped_one() -> None:
    other = SIZE._replace(group=8)
    write(
        tuning.shipped_file("interpreter"),
        *(tuning.Entry(CHOICES, s, OTHER) for s in (SIZE, other)),
    )
    assert (found(), found(other)) == (OTHER, OTHER)
    # The rule was the best here.
    write(mine(), tuning.Entry(CHOICES, SIZE, None))
    tuning.reload()
    assert (found(), found(other)) == (RULE, OTHER)


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    read_entries = tuning.read_entries

    def counted(path: Path, *rest: Any) -> Any:
        read.append(path)
        return read_entries(path, *rest)

    monkeypatch.setattr(tuning, "read_entries", counted)
    for _ in range(3):
        found()
    assert read == [tuning.shipped_file("interpreter"), mine()]


def spoil(change: Callable[[dict[str, Any]], object]) -> str:
    """The user's file with one good entry and one that ``change`` has spoiled, or a spoiled top."""
    good = tuning.Entry(CHOICES, SIZE._replace(group=8), OTHER)
    write(mine(), good, tuning.Entry(CHOICES, SIZE, OTHER))
    content = json.loads(mine().read_text())
    change(content)
    return json.dumps(content)


BAD_ENTRIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown operation 'matmul'": lambda entry: entry.update(op="matmul"),
    "version 0 of gather_scores, this is 1": lambda entry: entry.update(version=0),
    "block_k=48 is none of 16, 32": lambda entry: entry["choice"].update(block_k=48),
    "warps=True is none of": lambda entry: entry["choice"].update(warps=True),
    "warps='4' is none of": lambda entry: entry["choice"].update(warps="4"),
    "choice .* pass an object with block_k, warps": lambda entry: entry["choice"].pop("warps"),
    "size .* pass an object with": lambda entry: entry["size"].update(more=1),
    "its values must be strings": lambda entry: entry["size"].update(group=[1]),
    "measured 3 is no object": lambda entry: entry.update(measured=3),
}


@pytest.mark.parametrize("message", BAD_ENTRIES)
def test_an_entry_that_makes_no_sense_is_told_once_and_the_others_hold(message: str) -> None:
    mine_text = spoil(lambda content: BAD_ENTRIES[message](content["entries"][1]))
    mine().write_text(mine_text)
    with pytest.warns(
        UserWarning, match=rf"interpreter\.json: entries\[1\]: .*{message}"
    ) as records:
        assert found() is RULE
    assert "delete the file, or run `python examples/benchmarks/bench_launch.py" in str(
        records[0].message
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() is RULE
        assert found(SIZE._replace(group=8)) == OTHER
    # Writing drops what can't be used.
    write(mine(), tuning.Entry(CHOICES, SIZE, OTHER))
    tuning.reload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() == OTHER


BAD_FILES: dict[str, Callable[[], str]] = {
    "can't be read": lambda: "{",
    "can't be read .*recursion": lambda: "[" * 200_000,
    "can't be read .*digits": lambda: '{"format": ' + "1" * 5000 + "}",
    "has format 2, of a newer version; this one reads 1, and never": lambda: spoil(
        lambda content: content.update(format=2)
    ),
    "is no file of choices": lambda: "[]",
    "has format 0, this version reads 1": lambda: spoil(lambda content: content.update(format=0)),
    "was made on 'sm90-h200', this is 'interpreter'": lambda: spoil(
        lambda content: content.update(family="sm90-h200")
    ),
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_a_file_that_is_none_is_told_and_the_rule_holds(message: str) -> None:
    text = BAD_FILES[message]()
    mine().parent.mkdir(exist_ok=True)
    mine().write_text(text)
    with pytest.warns(UserWarning, match=message) as records:
        assert found() is RULE
    assert len(records) == 1


def test_a_file_that_may_not_be_read_is_told(home: Path) -> None:
    mine().mkdir(parents=True)
    with pytest.warns(UserWarning, match="can't be read"):
        assert found() is RULE


def test_an_interrupted_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write(mine(), tuning.Entry(CHOICES, SIZE, OTHER))
    before = mine().read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write(mine(), tuning.Entry(CHOICES, SIZE, None))
    assert mine().read_bytes() == before
    left = sorted(path.name for path in mine().parent.iterdir())
    assert left == ["interpreter.json", "interpreter.json.lock"]


def test_writers_at_the_same_time_lose_nothing() -> None:
    def work(number: int) -> None:
        for chosen in range(8):
            size = SIZE._replace(selections=number, chosen=chosen)
            write(mine(), tuning.Entry(CHOICES, size, OTHER))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    entries, wrong = tuning.read_entries(mine(), "interpreter", tuning.operations())
    assert len(entries) == 24 and not wrong
    assert not list(mine().parent.glob("*.new"))


def test_what_was_written_may_be_read_by_whom_any_file_may(home: Path) -> None:
    write(mine(), tuning.Entry(CHOICES, SIZE, OTHER))
    plain = home / "plain"
    plain.touch()
    assert mine().stat().st_mode == plain.stat().st_mode


def test_a_file_of_a_newer_version_is_left_alone() -> None:
    mine().parent.mkdir()
    text = '{"format": 2, "family": "interpreter", "entries": [{"op": "gather_scores"}]}'
    mine().write_text(text)
    with pytest.raises(ValueError, match=r"format 2, of a newer version; this one writes 1: inst"):
        write(mine(), tuning.Entry(CHOICES, SIZE, OTHER))
    assert mine().read_text() == text


def test_a_choice_outside_of_the_space_is_not_written() -> None:
    with pytest.raises(ValueError, match="warps=3 is none of 1, 2, 4, 8"):
        write(mine(), tuning.Entry(CHOICES, SIZE, ScoresChoice(16, 3)))
    assert not mine().exists()


def test_where_the_users_file_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_KVRET_TUNING", "~/mine")
    monkeypatch.setenv("HOME", "/home/someone")
    assert tuning.user_file("x") == Path("/home/someone/mine/x.json")
    monkeypatch.delenv("HF_KVRET_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tuning.user_file("x") == Path("/cache/hf_kvret/tuning/x.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning.user_file("x") == Path("/home/someone/.cache/hf_kvret/tuning/x.json")


def test_without_a_home_nothing_is_written_into_the_working_folder() -> None:
    with pytest.raises(ValueError, match="name a folder in HF_KVRET_TUNING"):
        write(Path("~") / ".cache" / "x.json")


def test_a_space_names_the_fields_of_its_choices() -> None:
    with pytest.raises(ValueError, match=r"must name the fields of ScoresChoice"):
        tuning.Tunable("x", 1, ScoresSize, ScoresChoice, {"block_k": (16,)})


def test_every_rule_lies_in_the_space_of_its_operation() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        for dim in (5, 16, 64, 96, 128, 192, 256):
            size = gather.GatherSize(dtype, dim, dim, 4, 8, 1024, "host")
            gather.CHOICES.check(gather.rule(size))
            scores = scoring.rule(ScoresSize(dtype, dim, 4, 8, 1024, "host"))
            CHOICES.check(scores)
            columns, itemsize = (
                2 * max(16, tuning.power_of_two(dim)),
                4 if dtype == "float32" else 2,
            )
            for rows in (1, 8, 64):
                for shared_bytes in (48 << 10, 99 << 10, 227 << 10):
                    rule = prompt.rule(rows, columns, itemsize, shared_bytes)
                    prompt.CHOICES.check(rule)


class Spy:
    """Stands for a kernel: notes what it is launched with, and launches it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.launches.append(options)
            return self.kernel[grid](*arguments, **options)

        return launch


needs_interpreter = pytest.mark.skipif(
    not interpreted(), reason="choices for the interpreter; tests on a GPU time nothing"
)


@needs_interpreter
def test_a_launch_of_gather_scores_takes_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(scoring._gather_scores_kernel)
    monkeypatch.setattr(scoring, "_gather_scores_kernel", spy)
    rows = PagedRows([torch.randn(4, 2, 8, 32).half()], torch.arange(4).int().view(1, 4), 16)
    query, ids = torch.randn(1, 4, 2, 16).half(), torch.arange(30).int().expand(1, 2, 2, 30)
    results = []
    for choice in (None, OTHER):
        write(mine(), tuning.Entry(CHOICES, SIZE, choice))
        tuning.reload()
        results.append(gather_scores(query, rows, ids, scale=1.0, backend="triton"))
    launched = [(options["BLOCK_K"], options["num_warps"]) for options in spy.launches]
    assert launched == [(RULE.block_k, RULE.warps), (128, 2)] and launched[0] != launched[1]
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@needs_interpreter
def test_launches_of_gather_attention_take_their_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, copy = Spy(gather._attend_kernel), Spy(gather._copy_kernel)
    monkeypatch.setattr(gather, "_attend_kernel", attend)
    monkeypatch.setattr(gather, "_copy_kernel", copy)
    rows = PagedRows([torch.randn(4, 2, 8, 32)], torch.arange(4).int().view(1, 4), 16)
    query, ids = torch.randn(1, 4, 2, 16), torch.arange(30).int().expand(1, 2, 2, 30)
    size = gather.GatherSize("float32", 16, 16, 2, 4, 32, "device")
    assert gather.size_of(query, rows, ids) == size
    choice = gather.GatherChoice("gather", 8, 16, 8, 2, 1, 16)
    write(mine(), tuning.Entry(gather.CHOICES, size, choice))
    options: dict[str, Any] = {"scale": 1.0, "backend": "triton"}
    tuned = gather_attention(query, rows, ids, **options)
    assert (copy.launches[0]["BLOCK_K"], copy.launches[0]["num_warps"]) == (8, 8)
    taken = attend.launches[0]
    assert (taken["USE_COPY"], taken["BLOCK_K"], taken["num_warps"], taken["num_stages"]) == (
        True, 16, 8, 2,
    )  # fmt: skip
    # What the caller says stands before what was measured.
    said = gather_attention(query, rows, ids, variant="direct", **options)
    assert len(copy.launches) == 1 and not attend.launches[1]["USE_COPY"]
    for one, other in zip(tuned, said, strict=True):
        assert torch.equal(one, other)


@needs_interpreter
def test_prompt_attention_takes_its_choice_for_few_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = Spy(prompt._attend_kernel)
    monkeypatch.setattr(prompt, "_attend_kernel", spy)
    key = torch.randn(1, 2, 40, 16)
    choice = prompt.PromptChoice(16, 2, 1, 4, 32, 32)
    entries = [
        tuning.Entry(
            prompt.CHOICES,
            prompt.DecodeSize("float32", 16, 16, rows, 2, 64, False),
            choice,
        )
        for rows in (2, 128)
    ]
    write(mine(), *entries)
    for queries in (1, 40):
        query = torch.randn(1, 4, queries, 16)
        prompt_attention(query, key, key, scale=1.0, causal_offset=None, backend="triton")
    launched = [(options["BLOCK_N"], options["num_warps"]) for options in spy.launches]
    assert launched == [(16, 2), (32, 8)]
