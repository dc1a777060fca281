"""Mutated result files: each is refused, or has exactly the content that was measured.

A cell that was taken out is the exception: it is measured again. Lies have right checksums: what is
not refused there must make a table, or be refused when the table is made, and can be gone on with.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.tasks import TASKS
from hf_kvret.lab.report.report import _load
from hf_kvret.lab.report.results import (
    FORMAT,
    Results,
    _cell_checksum,
    _checksum,
    read_results,
    why_no_results,
)

MEASUREMENTS = {f"eval {name}": task for name, task in TASKS.items()}
COUNT, PARTS = 600, 15
CACHES = {"full": 1.0, "paris": 0.02, "lrqk": 0.05}
VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 1, 10**9, 2**62, 1e308, 0.5, True, False),
    *("x", "", "../../x", [], {}, [1], [[]], {"a": 1}),
)
BOMBS = (
    *(b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"", b"null", b"[]", b"{}"),
    *(b'{"format": 1, "cells": ' + b"[" * 70 + b"]" * 70 + b"}", b'{"cells": ' + b"9" * 5000),
)
Content = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of six cells."""
    return _six_cells(tmp_path_factory.mktemp("results") / "r.json", "m")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """The same cells of another model."""
    content: Content = json.loads(_six_cells(tmp_path_factory.mktemp("other") / "r.json", "n"))
    return content


def _six_cells(path: Path, model: str) -> bytes:
    results = Results("eval ruler", {"model": model, "samples": 2, "lengths": [4096, 8192]}, path)
    for length in (4096, 8192):
        for cache, read in CACHES.items():
            cell = {"cache": cache, "task": "vt", "length": length, "questions": "inside"}
            row = {"score": 50.0 + 48 * read, "read_ratio": read, "step_bytes": 4, "full_bytes": 99}
            results.add(cell, row)
    return path.read_bytes()


def _seal(content: Content) -> None:
    """Make the checksums right, as far as there is anything that can have one."""
    above = {name: one for name, one in content.items() if name not in ("cells", "checksum")}
    content["checksum"] = _checksum(above)
    entries = content.get("cells")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            entry["checksum"] = _cell_checksum(entry, content["checksum"])


# --- mutations -------------------------------------------------------------------------------


def _part(rng: random.Random, content: Content) -> dict[str, Any]:
    entry = rng.choice(content["cells"])
    return rng.choice([entry["cell"], entry["result"]])


def value_in_a_cell(rng: random.Random, content: Content) -> None:
    part = _part(rng, content)
    part[rng.choice(sorted(part))] = rng.choice(VALUES)


def value_missing(rng: random.Random, content: Content) -> None:
    part = _part(rng, content)
    del part[rng.choice(sorted(part))]


def value_more(rng: random.Random, content: Content) -> None:
    _part(rng, content)[rng.choice(["failed", "score_error", "samples", ""])] = rng.choice(VALUES)


def value_that_is_no_number(rng: random.Random, content: Content) -> None:
    names = ("score", "read_ratio", "step_bytes", "full_bytes")
    number = rng.choice([float("nan"), float("inf"), -float("inf")])
    rng.choice(content["cells"])["result"][rng.choice(names)] = number


def digit(rng: random.Random, content: Content) -> None:
    entry = rng.choice(content["cells"])
    entry["result"]["score"] += rng.choice([1e-9, 0.1, 10.0])


def results_swapped(rng: random.Random, content: Content) -> None:
    one, other = rng.sample(content["cells"], 2)
    one["result"], other["result"] = other["result"], one["result"]


def top_level(rng: random.Random, content: Content) -> None:
    content[rng.choice(sorted(content))] = rng.choice(VALUES)


def top_level_missing(rng: random.Random, content: Content) -> None:
    del content[rng.choice(sorted(content))]


def in_the_setup(rng: random.Random, content: Content) -> None:
    content["setup"][rng.choice([*content["setup"], "new"])] = rng.choice(VALUES)


def in_an_environment(rng: random.Random, content: Content) -> None:
    environment = content["environments"][0]
    environment[rng.choice(sorted(environment))] = rng.choice(VALUES)


def entry_of_nothing(rng: random.Random, content: Content) -> None:
    content["cells"][rng.randrange(len(content["cells"]))] = rng.choice(VALUES)


def in_an_entry(rng: random.Random, content: Content) -> None:
    entry = rng.choice(content["cells"])
    entry[rng.choice([*sorted(entry), "more"])] = rng.choice(VALUES)


def cell_taken_out(rng: random.Random, content: Content) -> None:
    del content["cells"][rng.randrange(len(content["cells"]))]


def cell_twice(rng: random.Random, content: Content) -> None:
    content["cells"].insert(rng.randrange(7), copy.deepcopy(rng.choice(content["cells"])))


def cells_swapped(rng: random.Random, content: Content) -> None:
    one, two = rng.sample(range(len(content["cells"])), 2)
    cells = content["cells"]
    cells[one]["cell"], cells[two]["cell"] = cells[two]["cell"], cells[one]["cell"]


def cut(rng: random.Random, text: bytes) -> bytes:
    # Not only the last end of line.
    return text[: rng.randrange(len(text) - 2)]


def flip(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    changed[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def longer(rng: random.Random, text: bytes) -> bytes:
    return text + rng.choice([b"x", b"\0", b"{}", text])


def lines_lost(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def line_twice(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    return b"".join([*lines[:place], lines[place], *lines[place:]])


def bomb(rng: random.Random, text: bytes) -> bytes:
    return rng.choice(BOMBS)


IN_CONTENT: tuple[Callable[[random.Random, Content], None], ...] = (
    *(value_in_a_cell, value_missing, value_more, value_that_is_no_number, digit),
    *(results_swapped, top_level, top_level_missing, in_the_setup, in_an_environment),
    *(entry_of_nothing, in_an_entry, cell_taken_out, cell_twice, cells_swapped),
)
IN_TEXT: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(cut, flip, flip, flip, longer, lines_lost, line_twice, bomb),
)
# Given the cells of another file, too.
CELL_OF_ANOTHER = "cell of another"
MUTATIONS = (*IN_CONTENT, *IN_TEXT, CELL_OF_ANOTHER)
DAMAGED, LIED = "damaged", "lied"


def _mutated(
    rng: random.Random, mutation: Any, whole: bytes, other: Content, kind: str
) -> tuple[bytes, Content]:
    """A mutated file, and what it may be read as if it is damaged and not refused."""
    content: Content = json.loads(whole)
    original = copy.deepcopy(content)
    if mutation == CELL_OF_ANOTHER:
        place = rng.randrange(len(content["cells"]))
        content["cells"][place] = dict(other["cells"][place])
    elif mutation in IN_CONTENT:
        mutation(rng, content)
    if kind == LIED:
        _seal(content)
    text = json.dumps(content, indent=1).encode() + b"\n"
    expected = content if mutation is cell_taken_out else original
    return mutation(rng, text) if mutation in IN_TEXT else text, expected


# --- what must hold ---------------------------------------------------------------------------


def _measured(content: Content) -> str:
    """All that was measured, in one text: NaN equals itself."""
    return json.dumps([content[name] for name in ("name", "setup", "environments", "cells")])


@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))],
)
def test_a_mutated_result_file_is_refused_or_the_same(
    part: int, whole: bytes, other: Content, tmp_path: Path
) -> None:
    refused = same = 0
    for number in range(part, COUNT, PARTS):
        rng = random.Random(number)
        mutation = MUTATIONS[(number // PARTS + part) % len(MUTATIONS)]
        kind = rng.choice((DAMAGED, LIED))
        what = f"case {number}, {getattr(mutation, '__name__', mutation)}, {kind}"
        path = tmp_path / f"{number}.json"
        text, original = _mutated(rng, mutation, whole, other, kind)
        path.write_bytes(text)
        before = path.read_bytes()
        # Whatever it is, it is said without an error of its own.
        assert why_no_results(path) is None or isinstance(why_no_results(path), str)
        try:
            content = read_results(path)
        except ValueError as error:
            assert str(path) in str(error), what
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__} instead of a refusal") from error
        if kind == DAMAGED:
            assert _measured(content) == _measured(original), f"{what}: read with other content"
            same += 1
        try:
            _load(path, MEASUREMENTS)
        except ValueError as error:
            assert str(path) in str(error), what
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__} in its table") from error
        _goes_on(content, path, what)
        assert kind == DAMAGED or path.read_bytes() != before
    assert refused > same


def _goes_on(content: Content, path: Path, what: str) -> None:
    """A command that resumes keeps what was there, and adds to it."""
    try:
        results = Results(content["name"], content["setup"], path)
    except ValueError as error:
        # NaN is another set-up than itself.
        assert "another set-up" in str(error), what
        return
    results.add({"cache": "added"}, {"score": 1})
    again = read_results(path)
    assert again["format"] == FORMAT
    kept = {json.dumps(entry["cell"], sort_keys=True): entry for entry in content["cells"]}
    now = {json.dumps(entry["cell"], sort_keys=True): entry for entry in again["cells"]}
    for name, entry in kept.items():
        assert json.dumps(now[name]["result"]) == json.dumps(entry["result"]), what


@pytest.mark.parametrize("what", ["folder", "device", "nowhere"])
def test_what_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if what == "device" else tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"no file .*r\.json"):
        read_results(path)


@pytest.mark.parametrize(
    "bits", [(0, 5), pytest.param((1, 2, 3, 4, 6, 7), marks=pytest.mark.slow)], ids=str
)
def test_every_byte_of_a_small_file_is_watched(bits: tuple[int, ...], tmp_path: Path) -> None:
    """No flip but of blanks and of ends of lines goes unseen, and these change nothing."""
    path = tmp_path / "r.json"
    Results("eval x", {"seed": 1}, path).add({"cache": "a"}, {"score": 0.125})
    whole, original = path.read_bytes(), read_results(path)
    unseen = []
    for place in range(len(whole)):
        for bit in bits:
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                content = read_results(path)
            except ValueError:
                continue
            assert content == original, (place, bit)
            unseen.append(whole[place : place + 1])
    assert set(unseen) <= {b" ", b"\n"}
