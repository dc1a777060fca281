"""The app: texts, events of the page, its logic; its server is in ``test_app_server.py``."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import app
import numpy as np
import pytest
import torch
from app_parts.answers import Answer, Part, highlights
from app_parts.languages import Tokens, language_of
from app_parts.reading import CACHES, Limits, Reading
from app_parts.session import Choices, Desk, Session
from app_parts.showing import answer_html, document_html, escaped, notice, numbers_html
from app_parts.uploads import check_size, checked, text_of, visible

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.methods.ctkvr import CTkvrIndex


@pytest.fixture(scope="module")
def english() -> Subject:
    return load_subject("reference")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n ", "a.txt is empty: choose a file"),
        ("a.pdf", b"%PDF-1.7", r"a.pdf is a .pdf file, .* save it as text"),
        ("a.txt", b"caf\xe9", r"not UTF-8 text: byte 3 is 0xe9. Save it as UTF-8, .*iconv"),
        ("a", b"a\0b", "null characters"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_the_way_out(
    name: str, content: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        text_of(content, name)


def test_text_is_taken_as_it_is_but_for_line_ends() -> None:
    assert text_of(b"\xef\xbb\xbfa\r\nb\rc\n", "a.md") == "a\nb\nc\n"
    assert checked("a\ud800", "x") == "a?"
    with pytest.raises(ValueError, match=r"is 5.0 MB, and at most 1.0 MB .* --max-upload"):
        check_size(5_000_000, 1_000_000, "x")


def test_pieces_of_a_tokenizer_are_the_text(english: Subject) -> None:
    """Also where a character takes several tokens; special names in a document are text."""
    language = language_of(english, plain=False)
    text = "The naïve 🦉 says </s> twice:\n</s>"
    tokens = language.document(text)
    assert tokens.ids[0] == english.model.config.bos_token_id
    assert "".join(tokens.texts[1:]) == text
    assert "" in tokens.texts
    assert english.model.config.eos_token_id not in tokens.ids
    assert english.model.config.eos_token_id in language.stop
    assert "".join(language.answer(tokens.ids[1:])) == text
    assert language.answer(tokens.ids[1:6])[:1] == ["The"]


def test_a_chat_template_goes_around_document_and_question(english: Subject) -> None:
    assert english.tokenizer is not None
    english.tokenizer.chat_template = (
        "{% for one in messages %}<s>user: {{ one.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}"
    )
    chat, plain = (language_of(english, plain=plain) for plain in (False, True))
    tokens = chat.document("A text.") + chat.question("Why?")
    assert "".join(tokens.texts) == "<s>user: A text.\n\nWhy?</s>bot:"
    assert english.model.config.eos_token_id in tokens.ids
    assert "".join(plain.question("Why?").texts) == "\n\nWhy?"


Event = Callable[..., Iterator[list[Any]]]


@pytest.fixture(scope="module")
def events() -> dict[str, Event]:
    """By name of the function; generators of the page without a browser."""
    pytest.importorskip("gradio", reason="the extra app is not installed")
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


KEYS, VALUE = "k5 k9", "v7 v8"
NOISE = " ".join(f"n{number % 90}" for number in range(220))
TEXT = f"{NOISE} K {KEYS} {VALUE} {NOISE}\n"
QUESTION = f"Q {KEYS} ->"
SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"{SCRIPT}<img src=x onerror=alert(1)> & \"'` ${{1}} {{{{this}}}} \u202eabc\u0007"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("needle")


def desk_of(subject: Subject, shelf: Path | None = None, **limits: int) -> Desk:
    return Desk(subject, Choices(top_k="8", limits=Limits(**{"answer": 4, **limits}), shelf=shelf))


def answered(
    desk: Desk, method: str = "flat", rows: str = "8", text: str = TEXT
) -> tuple[list[str], Session, Any]:
    """What is said while a text is read, the session, and its answer about the text."""
    session = Session(desk)
    said = list(session.read(desk.of_text(text), method))
    list(session.ask(QUESTION, method, rows))
    assert session.answer is not None
    return said, session, session.answer


def test_a_needle_is_found_and_its_tokens_are_the_strongest(subject: Subject) -> None:
    _, _, answer = answered(desk_of(subject))
    assert answer.text.split() == VALUE.split()
    value = answer.all_texts.index(" v7")
    for (text, tokens), slot in zip(answer.words, (value, value + 1), strict=True):
        marks = highlights(answer, Part(tokens))
        assert answer.all_texts[slot] == text
        assert int(marks.shares.argmax()) == slot


def test_shares_are_those_of_attention_as_the_model_computes_it() -> None:
    """With a budget that covers everything; the model alone, by its own eager attention."""
    plain = load_bundled_model()
    plain.set_attn_implementation("eager")
    _, _, answer = answered(desk_of(load_subject("needle")), "paris", "10000")
    ids = torch.tensor([answer.prompt.ids + answer.ids[:-1]])
    with torch.inference_mode():
        attentions = plain(ids, output_attentions=True).attentions
    for step in range(len(answer.ids)):
        for layer, attention in enumerate(attentions):
            row = attention[0, :, len(answer.prompt) - 1 + step]
            for head in range(2):
                expected = row[2 * head : 2 * head + 2].mean(0).numpy()
                marks = highlights(answer, Part(range(step, step + 1), layer, head))
                result = marks.counts > 0
                got = marks.shares[: len(expected)]
                near = ~result[: len(expected)]
                np.testing.assert_allclose(got[~near], expected[~near], atol=1e-5)
                assert expected[near].sum() == pytest.approx(sum(marks.near_shares), abs=1e-4)


@pytest.mark.parametrize("method", CACHES)
def test_every_cache_that_is_offered_answers(subject: Subject, method: str) -> None:
    messages, _, answer = answered(desk_of(subject), method, "0.5")
    assert f"446 tokens read into {method} in" in messages[-1]
    assert answer.text.split() == VALUE.split()
    assert answer.exact == answer.text
    assert 0.5 < answer.read_ratio < 0.75
    assert answer.step_bytes > 0
    assert answer.rate > 0
    assert answer.dense is None


def test_full_attentions_answer_is_beside_one_that_retrieved_too_little(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(index: CTkvrIndex, query: torch.Tensor, _: ColdTokens) -> torch.Tensor:
        return query.new_zeros(1, index._heads, query.shape[2], 1).int()

    monkeypatch.setattr(CTkvrIndex, "search", first)
    monkeypatch.setattr(CTkvrIndex, "host_search", lambda *_: None)
    _, _, answer = answered(desk_of(subject), "ctkvr", "1")
    assert answer.exact is not None
    assert answer.exact.split() == VALUE.split()
    assert answer.text != answer.exact


def test_what_another_run_has_read_comes_from_the_shelf(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, _, expected = answered(desk_of(subject, tmp_path), "paris")
    assert messages[-2].endswith("putting them on the shelf ...") and messages[-1].endswith(" s.")
    monkeypatch.delattr(Reading, "read")
    messages, _, answer = answered(desk_of(subject, tmp_path), "paris")
    assert messages[1:] == ["the text: 446 tokens in paris, from the shelf."]
    assert answer.ids == expected.ids


def test_the_environment_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set here too, so that they are restored.
    for name in ("ALLOWED_PATHS", "LOCAL_DEV_MODE", "TEMP_DIR", "ANALYTICS_ENABLED"):
        monkeypatch.setenv(f"GRADIO_{name}", "/")
    app.close_environment()
    left = {name: value for name, value in os.environ.items() if name.startswith("GRADIO_")}
    assert left == {"GRADIO_TEMP_DIR": "/", "GRADIO_ANALYTICS_ENABLED": "False"}


def test_a_short_document_says_that_nothing_was_retrieved(subject: Subject) -> None:
    _, session, answer = answered(desk_of(subject), "paris", text="n1 n2 n3")
    assert answer.heads == {}
    assert answer.read_ratio == 1.0
    assert "fit into the window" in numbers_html(answer)
    assert "<mark style" in document_html(answer, session.part(None, 0, 0))  # the legend
    assert "of the attention, in" not in document_html(answer, session.part(None, None, None))


def hostile_answer() -> Answer:
    texts = re.findall(r"\W|\w+", HOSTILE)
    ids = list(range(len(texts)))
    return Answer(Tokens(ids, texts), len(texts) - 3, ids, texts)


def test_text_of_strangers_is_shown_as_it_is_and_nothing_else() -> None:
    answer = hostile_answer()
    part = Part(range(len(answer.steps)))
    for html in (document_html(answer, part), answer_html(answer, part), notice(HOSTILE, "error")):
        # It would not be read if elements were left open.
        page = [*ElementTree.fromstring(f"<div>{html}</div>").iter()]
        names = {"class", "style", "title", "dir", "role", "aria-label"}
        assert {element.tag for element in page} <= {"div", "span", "mark", "i", "b"}
        assert {name for element in page for name in element.attrib} <= names
        for sign in ("${", "{{", "`", "\u202e", "\u0007"):
            assert sign not in html
        assert SCRIPT in "".join(page[0].itertext())
    text = ElementTree.fromstring(f"<div>{escaped(HOSTILE)}</div>").text
    assert text == visible(HOSTILE)
    assert "‹U+202E›abc‹U+0007›" in visible(HOSTILE)


def test_what_is_too_long_is_refused_with_the_way_out(subject: Subject, tmp_path: Path) -> None:
    desk = desk_of(subject, tokens=100, upload=2_000, question=50)
    session = Session(desk)
    with pytest.raises(ValueError, match="no document yet"):
        list(session.ask(QUESTION, "flat", "8"))
    with pytest.raises(ValueError, match=r"446 tokens, and at most 100 .* --max-tokens"):
        list(session.read(desk.of_text(TEXT), "flat"))
    large = tmp_path / "large.txt"
    large.write_text("n1 " * 1_000)
    with pytest.raises(ValueError, match=r"large.txt is 3.0 KB, and at most 2.0 KB"):
        desk.of_file(large)
    with pytest.raises(ValueError, match=r"'hello' is not a word of the needle model"):
        desk.of_text("n1 hello")
    list(session.read(desk.of_text("n1 n2"), "flat"))
    for question, message in (("  ", "there is no question"), ("n1 " * 20, "at most 50")):
        with pytest.raises(ValueError, match=message):
            list(session.ask(question, "flat", "8"))
    # What was open stays.
    with pytest.raises(ValueError, match="no cache 'static'"):
        list(session.ask(QUESTION, "static", "8"))
    assert session.reading is not None


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    given = app.make_parser().parse_args(["--max-upload", "5MB", "--max-tokens", "2K"])
    assert (given.max_upload, given.max_tokens, given.cache) == (5_000_000, 2_048, "paris")
    for arguments in (["--port", "0"], ["--top-k", "-1"], ["--max-upload", "x"], ["--cache", "x"]):
        with pytest.raises(SystemExit):
            app.main(arguments)
    assert "is not a memory size" in capsys.readouterr().err
    given = app.make_parser().parse_args(["--shelf", __file__])
    with pytest.raises(ValueError, match="give a folder for the shelf"):
        Desk(load_subject("needle"), Choices(shelf=given.shelf))


def test_without_gradio_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app.importlib.util, "find_spec", lambda name: None)
    assert app.main([]) == 1
    assert 'pip install -c constraints.txt ".[app]"' in capsys.readouterr().err
