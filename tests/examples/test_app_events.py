"""What the app's page shows after each event: its generators without a browser. Needs Gradio."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import app_parts.reading as reading_module  # noqa: E402
from app_parts.reading import Limits  # noqa: E402
from app_parts.session import Choices, Desk  # noqa: E402

from hf_kvret.lab.evaluate.subject import load_subject  # noqa: E402

if importlib.util.find_spec("gradio") is None:
    pytest.skip("the extra app is not installed", allow_module_level=True)

TEXT = "n1 " * 200 + "K k5 k9 v7 v8 " + "n2 " * 200
QUESTION = "Q k5 k9 ->"
Event = Callable[..., Iterator[list[Any]]]


@pytest.fixture(scope="module")
def events() -> dict[str, Event]:
    """By name of the function."""
    from app_parts.page import make_page

    desk = Desk(load_subject("needle"), Choices(limits=Limits(answer=4)))
    return {one.name: one.fn for one in make_page(desk).fns.values()}


def is_blank(view: list[Any]) -> bool:
    """Numbers, word, layer, head and document."""
    numbers, *looks, document = view
    return numbers == document == "" and not any(one["visible"] for one in looks)


def opened(events: dict[str, Event]) -> Any:
    """A session with an answer about ``TEXT``."""
    *_, last = events["read_text"](TEXT, None, "flat")
    *_, last = events["answer"](last[0], QUESTION, "flat", "8")
    assert last[3] and last[-1]
    return last[0]


def test_beside_a_new_answer_nothing_of_the_old_one_is_shown(events: dict[str, Event]) -> None:
    session = opened(events)
    first, *grows, last = list(events["answer"](session, QUESTION, "flat", "8"))
    assert "answering ..." in first[1]
    assert first[2] == "" and is_blank(first[3:])
    for change in grows:
        assert "answering ..." in change[1] and "v7" in change[2]
        # Left as they are, which is blank.
        assert all(set(one) == {"__type__"} for one in change[3:])
    assert "2 tokens from a fork" in last[1]
    assert "v7 v8" in last[2] and not is_blank(last[3:])


def test_a_word_chosen_while_an_answer_grows_changes_nothing(events: dict[str, Event]) -> None:
    session = opened(events)
    growing = events["answer"](session, QUESTION, "flat", "8")
    for _ in range(2):
        next(growing)
        look = events["look"](session, 0, -1, -1)
        assert all(set(one) == {"__type__"} for one in look)
    list(growing)
    assert all(isinstance(one, str) for one in events["look"](session, 0, -1, -1))


def test_stopped_in_the_middle_the_document_stays_and_the_answer_goes(
    events: dict[str, Event],
) -> None:
    session = opened(events)
    growing = events["answer"](session, QUESTION, "flat", "8")
    for _ in range(2):
        next(growing)
    events["halt"](session)
    (last,) = growing
    assert "Stopped" in last[1]
    assert last[2] == "" and is_blank(last[3:])
    *_, last = events["answer"](session, QUESTION, "flat", "8")
    assert "v7 v8" in last[2]


def test_out_of_memory_is_said_beside_what_is_still_open(
    events: dict[str, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(*_: object, **__: object) -> None:
        raise MemoryError

    session = opened(events)
    monkeypatch.setattr(reading_module.Reader, "feed", feed)
    *_, last = events["read_text"]("n1 n2", session, "flat")
    assert 'role="alert"' in last[1] and "out of memory" in last[1] and "--max-tokens" in last[1]
    assert "v7 v8" in last[2] and not is_blank(last[3:])
    *_, last = events["answer"](session, QUESTION, "flat", "8")
    assert 'role="alert"' in last[1] and "out of memory" in last[1]
    assert last[2] == "" and is_blank(last[3:])


def test_a_fault_is_shown_and_raised(
    events: dict[str, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(*_: object, **__: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(reading_module.Reader, "feed", feed)
    changes = events["read_text"](TEXT, None, "flat")
    assert "reading" in next(changes)[1]
    assert "shapes differ" in next(changes)[1]
    with pytest.raises(RuntimeError, match="shapes differ"):
        next(changes)
