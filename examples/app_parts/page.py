"""The page: Gradio's parts, and what changes with what. What they show is made elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from app_parts.reading import CACHES
from app_parts.session import Desk, Session
from app_parts.showing import answer_html, document_html, notice, numbers_html
from app_parts.uploads import size_text, visible

STYLE = Path(__file__).with_name("style.css")
# Gradio's own themes take their fonts from Google.
THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
_ALL = -1
_WORD_LEN = 24


def make_page(desk: Desk) -> gr.Blocks:
    """The page for a model."""
    limits, begin = desk.limits, desk.choices
    questions = () if desk.example is None else desk.example.questions
    has_example = bool(questions)
    page = gr.Blocks(
        title="hf_kvret: what an answer retrieved",
        analytics_enabled=False,
        # Uploads are deleted when they are an hour old.
        delete_cache=(600, 3600),
    )
    with page:
        gr.Markdown(
            "# What an answer retrieved\n\n"
            f"Model: `{visible(desk.subject.name)}`. A document is read once; each question forks "
            "the filled cache, and for each word of the answer you see which tokens were retrieved."
        )
        state = gr.State(None, time_to_live=3600)
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                file = gr.File(
                    label=f"Document: plain text, up to {size_text(limits.upload)}", height=150
                )
                text = gr.Textbox(label="or paste text", lines=4, max_lines=8)
                with gr.Row():
                    read = gr.Button("Read", min_width=80)
                    example = gr.Button("Example", min_width=80, visible=has_example)
                with gr.Row():
                    cache = gr.Dropdown(
                        list(CACHES), value=begin.cache, label="Cache", min_width=120
                    )
                    top_k = gr.Textbox(begin.top_k, label="top_k: count or share", min_width=120)
                question = gr.Textbox(label="Question, or text to continue", lines=3, max_lines=6)
                with gr.Row():
                    ask = gr.Button("Ask", variant="primary", min_width=80)
                    stop = gr.Button("Stop", min_width=80)
                with gr.Accordion("Questions about the example", open=False, visible=has_example):
                    samples = gr.Dataset(
                        components=[question],
                        samples=[[one] for one in questions],
                        show_label=False,
                        type="values",
                    )
            with gr.Column(scale=3, min_width=300):
                step = desk.first_step
                status = gr.HTML(notice(f"{step[0].upper()}{step[1:]}."))
                shown = gr.HTML("", elem_id="kvret-answer")
                numbers = gr.HTML("")
                word = gr.Radio(label="Word of the answer", visible=False, elem_id="kvret-word")
                with gr.Row():
                    layer = gr.Dropdown(
                        label="Layer", visible=False, min_width=120, elem_id="kvret-layer"
                    )
                    head = gr.Dropdown(
                        label="KV head", visible=False, min_width=120, elem_id="kvret-head"
                    )
                document = gr.HTML("", elem_id="kvret-document")

        looks = [word, layer, head]
        view = [shown, numbers, *looks, document]
        # While an answer grows: the word list and all after it stay blank.
        rest: list[Any] = [gr.skip() for _ in view[1:]]

        def reading(session: Session | None, make: Any, method: str) -> Iterator[list[Any]]:
            session = session or Session(desk)

            def changes(session: Session) -> Iterator[list[Any]]:
                for message in session.read(make(), method):
                    yield [session, notice(message), *_blank()]

            yield from _told(session, changes(session))

        def read_file(path: str | None, session: Any, method: str) -> Iterator[list[Any]]:
            if path is not None:
                yield from reading(session, lambda: desk.of_file(Path(path)), method)

        def read_text(pasted: str, session: Any, method: str) -> Iterator[list[Any]]:
            yield from reading(session, lambda: desk.of_text(pasted), method)

        def read_example(session: Any, method: str) -> Iterator[list[Any]]:
            for change in reading(session, desk.of_example, method):
                yield [*change, questions[0]]

        def answer(
            session: Session | None, asked: str, method: str, rows: str
        ) -> Iterator[list[Any]]:
            session = session or Session(desk)

            def changes(session: Session) -> Iterator[list[Any]]:
                message = ""
                for event in session.ask(asked, method, rows):
                    if isinstance(event, str):
                        message = notice(event)
                        yield [session, message, *_blank()]
                    else:
                        yield [session, message, answer_html(event, event.whole), *rest]
                yield [session, notice(_summary(session)), *_view(session)]

            yield from _told(session, changes(session))

        def halt(session: Session | None) -> None:
            if session is not None:
                session.stopped = True

        def look(session: Session | None, chosen: Any, at: Any, of: Any) -> list[Any]:
            if session is None or session.answer is None:
                return [gr.skip(), gr.skip()]
            part = session.part(*(None if one in (None, _ALL) else one for one in (chosen, at, of)))
            return [answer_html(session.answer, part), document_html(session.answer, part)]

        # One visitor after the other uses the model.
        model: dict[str, Any] = {
            "concurrency_limit": 1,
            "concurrency_id": "model",
            "api_visibility": "private",
            "show_progress": "hidden",
        }
        # Said by the browser itself, until it is one's turn.
        waiting = f"() => {json.dumps(notice('Waiting for the model ...'))}"
        for trigger in (file.upload, read.click, example.click, ask.click):
            trigger(None, None, status, js=waiting, api_visibility="private")
        changed = [state, status, *view]
        file.upload(read_file, [file, state, cache], changed, **model)
        read.click(read_text, [text, state, cache], changed, **model)
        example.click(read_example, [state, cache], [*changed, question], **model)
        ask.click(answer, [state, question, cache, top_k], changed, scroll_to_output=True, **model)
        # Not by Gradio's ``cancels``: what is started just after it can get lost.
        stop.click(halt, state, api_visibility="private")
        samples.click(lambda row: row[0], samples, question, api_visibility="private")
        for one in looks:
            one.input(
                look,
                [state, *looks],
                [shown, document],
                show_progress="hidden",
                api_visibility="private",
            )
    return page


def _told(session: Session, changes: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """The changes; where they are stopped or end in an error, that beside what is still open."""
    session.stopped = False
    try:
        for change in changes:
            yield change
            if session.stopped:
                yield [session, notice("Stopped."), *_view(session)]
                break
        return
    except (ValueError, MemoryError) as error:
        message = str(error)
    except RuntimeError as error:
        message = f"this should not happen, and the terminal says where it did: {error}"
        yield [session, notice(message, "error"), *_view(session)]
        raise
    # Behind the handler, as an error keeps what it found in memory.
    yield [session, notice(message, "error"), *_view(session)]


def _blank() -> list[Any]:
    return ["", "", *(gr.update(visible=False) for _ in range(3)), ""]


def _view(session: Session) -> list[Any]:
    """All that is shown of the answer, the whole of it chosen; blank where there is none."""
    answer = session.answer
    if answer is None:
        return _blank()
    words, heads = answer.words, answer.heads
    labels = [(_label(text), number) for number, (text, _) in enumerate(words)]
    part = answer.whole
    layers = [("all layers", _ALL), *((f"layer {one}", one) for one in heads)]
    most = max(heads.values(), default=0)
    of = [("all heads", _ALL), *((f"head {one}", one) for one in range(most))]
    return [
        answer_html(answer, part),
        numbers_html(answer),
        gr.update(choices=[("whole answer", _ALL), *labels], value=_ALL, visible=bool(words)),
        gr.update(choices=layers, value=_ALL, visible=bool(heads)),
        gr.update(choices=of, value=_ALL, visible=bool(heads)),
        document_html(answer, part),
    ]


def _label(word: str) -> str:
    text = visible(word).strip() or "↵"
    return text if len(text) <= _WORD_LEN else text[: _WORD_LEN - 1] + "…"


def _summary(session: Session) -> str:
    answer = session.answer
    assert answer is not None and session.reading is not None, "it was just given"
    if not answer.ids:
        return "The model ended its answer before the first word: ask in other words."
    count, method = len(answer.ids), session.reading.method
    same = "Full attention gives the same answer. " if answer.exact == answer.text else ""
    if answer.exact is not None and not same:
        same = f"Full attention answers: {answer.exact.strip()!r}. "
    return f"{count} tokens from a fork of the {method} cache. {same}Choose a word of the answer."
