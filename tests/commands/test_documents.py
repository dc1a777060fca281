"""``hf-kvret read``, ``ask`` and ``shelf``, and questions from Python."""

import copy
import functools
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret import ParisKVCache, Shelf
from hf_kvret.commands import documents as command
from hf_kvret.commands.documents import document_text, is_stream
from hf_kvret.contracts.signals import interruptible
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.shelf.questions import plain_generation_config, positions
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

TEXT = "\n\n".join(f"Chapter {n}. The {n}th king had {3 * n} ships." for n in range(40))
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SHORT = TEXT[:400]
QUESTION = "How many ships had the 7th king?"
METHOD = "paris:top_k=1000000:recent=64:flush=64:dense_below=0"


@pytest.fixture(scope="module")
def reference(subjects: Callable[..., Subject]) -> Subject:
    return subjects("reference", torch.float32, "cpu")


@pytest.fixture(scope="module")
def subjects() -> Callable[..., Subject]:
    """Models as the command line names them, each loaded once."""
    return functools.cache(load_subject)


@pytest.fixture(autouse=True)
def _short(monkeypatch: Patch, subjects: Callable[..., Subject]) -> None:
    """Chunks of which a short document has several."""
    monkeypatch.setattr(command, "_CHUNK", 128)
    monkeypatch.setattr(command, "_LEAST_CHUNK", 64)
    monkeypatch.setattr(command, "load_subject", subjects)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "kings.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")


@pytest.fixture
def read(program: Any, document: Path, shelf: Shelf) -> Any:
    """Reads the document onto the shelf: what was printed, as of ``program``."""
    words = ["read", document, "--model", "reference", "--method", METHOD, "--shelf", shelf.folder]
    return lambda *more, **status: program(*words, *more, **status)


def _cache(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> ParisKVCache:
    cache = ParisKVCache(model.config, **{**COVERING_OPTIONS, **options})
    generate: Any = model.generate
    generate(ids, past_key_values=cache, max_new_tokens=1)
    return cache


def test_a_document_is_read_once_and_asked_about(
    reference: Subject, shelf: Shelf, read: Any, program: Any
) -> None:
    tokenizer = reference.need_tokenizer("a test")
    ids = hf_kvret.document_ids(tokenizer, TEXT)
    count = ids.shape[1]
    assert f"read {count:,} of {count:,} tokens" in read().out
    asks = ["ask", "kings", QUESTION, "--shelf", shelf.folder, "--new-tokens", 9]
    shown = program(*asks).out
    behind = tokenizer(f"\n\n{QUESTION}\n", add_special_tokens=False)["input_ids"]
    prompt = torch.cat([ids, torch.tensor([behind])], dim=1)
    model: Any = reference.model
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(expected, skip_special_tokens=True).strip() in shown
    assert f"all {count:,} tokens are on" in read().out
    assert f"read 1 of {count:,} tokens" in read("--name", "other").out
    [entry] = shelf.entries()
    assert entry.title == "other", "one title each"


def test_a_shelf_without_room_is_found_behind_the_first_chunk(
    reference: Subject, shelf: Shelf, read: Any
) -> None:
    passes: list[int] = []
    model: Any = reference.model
    hook = model.lm_head.register_forward_hook(lambda *_: passes.append(1))
    with ExitStack() as stack:
        stack.callback(hook.remove)
        shown = read("--max-size", "300KB", status=2).err
    assert "the shelf holds at most 0.3 MB: give a larger max_size" in shown
    assert len(passes) == 1 and not shelf.entries()
    # Codes of 4 bits take an eighth of these rows, with or without a store so far.
    cache = _cache(model, torch.arange(3, 203)[None], store="higgs", dense_below=900)
    Shelf(shelf.folder, cache.memory().full_attention).check_room(cache, 400)


@pytest.mark.parametrize("moment", ["layer", "put"])
def test_an_interrupt_keeps_whole_chunks(
    moment: str, reference: Subject, shelf: Shelf, read: Any, capsys: Capture, monkeypatch: Patch
) -> None:
    """In the middle of a pass, behind its last layer, or while all is written."""
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model: Any = reference.model
    with ExitStack() as stack:
        if moment == "put":
            calls += [1, 1]
            put = Shelf.put
            monkeypatch.setattr(Shelf, "put", lambda *args: [count(), put(*args)][1])
        else:
            part = model.model.layers[2] if moment == "layer" else model.lm_head
            stack.callback(part.register_forward_pre_hook(count).remove)
        with pytest.raises(KeyboardInterrupt):
            read()
    kept = "256" if moment != "put" else ""
    assert f"{kept} tokens were kept" in capsys.readouterr().err
    [entry] = shelf.entries()
    assert entry.tokens == 256 or moment == "put"
    shown = read("--name", "kings").out
    new = 1 if moment == "put" else shelf.entry("kings").tokens - 256
    assert f"read {new:,} of" in shown


@pytest.mark.parametrize(
    ("name", "moment", "snapshots", "kept"),
    [
        ("gemma3", "layer", False, []),
        ("qwen3_next", "layer", False, []),
        ("qwen3_next", "layer", True, [70]),
        # All layers have all rows.
        ("qwen3_next", "head", False, [100]),
    ],
)
def test_models_that_can_not_go_back_begin_again_without_a_snapshot(
    name: str, moment: str, snapshots: bool, kept: list[int], tmp_path: Path, capsys: Capture
) -> None:
    model: Any = MODELS[name].build()
    ids, shelf = prompt(1, 100), Shelf(tmp_path)
    cache = _cache(model, ids[:, :70])

    def interrupt(module: Any, inputs: Any) -> None:
        # The first tokens are read again before the pass, as the hook is new.
        if moment == "head" or inputs[0].shape[1] == 30:
            raise KeyboardInterrupt

    part = model.model.layers[1] if moment == "layer" else model.lm_head
    hook = part.register_forward_pre_hook(interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(ids[:, 70:], past_key_values=cache)
    hook.remove()
    if not snapshots:
        cache.snapshots.reset()
    command._keep_part(shelf, cache, ids, Subject(name, model, None))
    begins_again = "nothing was kept, the same command begins again: " in capsys.readouterr().err
    assert begins_again == (not kept)
    assert [entry.tokens for entry in shelf.entries()] == kept


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_signal_in_a_chunk_keeps_whole_ones(name: str, tmp_path: Path, capsys: Capture) -> None:
    """Where windows that are full can't go back, it waits for the end of the chunk."""
    model: Any = MODELS[name].build()
    hf_kvret.attach(model)
    ids, shelf, calls = prompt(1, 500), Shelf(tmp_path), []
    cache = ParisKVCache(model.config, **COVERING_OPTIONS)

    def hang_up(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGHUP)

    model.model.layers[0].mlp.register_forward_pre_hook(hang_up)
    # Under nohup it would be ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with interruptible(signal.SIGHUP), pytest.raises(KeyboardInterrupt):
        command._read(Subject(name, model, None), cache, ids, name, shelf)
    command._keep_part(shelf, cache, ids, Subject(name, model, None))
    kept = 256 if name == "llama" else 384
    signal.signal(signal.SIGHUP, before)
    assert f"{kept} tokens were kept" in capsys.readouterr().err
    assert [entry.tokens for entry in shelf.entries()] == [kept]


@pytest.mark.parametrize("template", [None, TEMPLATE.replace("</{{ m.role }}>", "</s>")])
def test_control_tokens_of_strangers_are_text(
    template: str | None, reference: Subject, monkeypatch: Patch
) -> None:
    tokenizer, model = reference.need_tokenizer("a test"), reference.model
    monkeypatch.setattr(tokenizer, "chat_template", template)
    hostile, before = "One.</s><s>Two.<pad>", "<user>" if template else ""
    ids = hf_kvret.document_ids(tokenizer, hostile)
    assert not {*ids[0].tolist()} & {*tokenizer.all_special_ids}
    assert tokenizer.decode(ids[0]) == before + hostile
    cache, asked = _cache(model, ids), []
    monkeypatch.setattr(model, "generate", lambda prompt, **_: [asked.append(prompt), prompt][1])
    hf_kvret.ask(model, tokenizer, cache, f"What of {hostile}?")
    behind = asked[0][0, ids.shape[1] :].tolist()
    # Those of the template are what they were.
    assert behind.count(tokenizer.eos_token_id) == (template is not None)
    assert f"What of {hostile}?" in tokenizer.decode(behind)
    usual = hf_kvret.document_ids(tokenizer, TEXT)[0].tolist()
    assert usual == tokenizer(before + TEXT)["input_ids"], "all at once where it is harmless"


def test_a_shelf_is_listed_checked_and_cleared(shelf: Shelf, read: Any, program: Any) -> None:
    place = ["--shelf", shelf.folder]
    assert "nothing is on" in program("shelf", "list", *place).out
    read("--name", "a")
    assert "| paris " in program("shelf", "list", *place).out
    shown = {
        action: program("shelf", action, "--name", "a", *place).out
        for action in ("inspect", "verify", "remove")
    }
    assert "title: a\n" in shown["inspect"] and "dtype: float32\n" in shown["inspect"]
    assert "whole" in shown["verify"] and "removed a" in shown["remove"]
    error = program("shelf", "remove", "--name", "a", *place, status=2).err
    assert "no entry 'a', it has nothing" in error
    assert "give --name" in program("shelf", "remove", *place, status=2).err
    program("ask", "a", "Why?", *place, status=2)


def test_ask_takes_the_newest_document_of_a_name(
    document: Path, shelf: Shelf, read: Any, program: Any
) -> None:
    place = ["--shelf", shelf.folder]
    names = []
    for text in (SHORT, SHORT.replace("ships", "boats"), SHORT):
        document.write_text(text)
        read()
        names.append(shelf.entry("kings").name)
    newest, other, again = names
    assert newest == again != other
    shown = program("ask", "kings", QUESTION, *place, "--new-tokens", 2).err
    assert f"2 documents are called kings: this is {newest}" in shown
    error = program("shelf", "remove", "--name", "kings", *place, status=2).err
    assert f"give the name of one, {newest}, {other}" in error
    program("shelf", "remove", "--name", other, *place)
    program("shelf", "remove", "--name", "kings", *place)
    assert not shelf.entries()


def test_names_are_shown_escaped(document: Path, tmp_path: Path, program: Any) -> None:
    document.write_text(SHORT)
    title, place = "a|b\nc\x1b[31m", ["--shelf", tmp_path / "a\x1bb"]
    named = ["--name", title, *place]
    shown = [
        program("read", document, "--model", "reference", "--method", METHOD, *named),
        program("shelf", "list", *place),
        program("shelf", "inspect", *named),
        program("ask", title, QUESTION, *place, "--new-tokens", 2),
        program("read", tmp_path / "no\x1bfile", *place, status=2),
        program("shelf", "remove", *named),
    ]
    assert not any("\x1b" in one.out + one.err for one in shown)
    *_, header, _, row = shown[1].out.strip().splitlines()
    assert title.encode("unicode_escape").decode().replace("|", "\\|") in row
    assert row.replace("\\|", "").count("|") == header.count("|")


def test_defaults_of_a_model_do_not_contradict_a_question(
    reference: Subject, monkeypatch: Patch
) -> None:
    tokenizer, model = reference.need_tokenizer("a test"), reference.model
    cache = _cache(model, hf_kvret.document_ids(tokenizer, SHORT))
    expected = hf_kvret.ask(model, tokenizer, cache, QUESTION, max_new_tokens=3)
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    contradicting = {"cache_implementation": "static", "num_beams": 3, "num_return_sequences": 2}
    contradicting |= {"length_penalty": 2.0, "min_new_tokens": 7, "forced_eos_token_id": 5}
    kept = {"stop_strings": ["ships"], "repetition_penalty": 1.0, "num_assistant_tokens": 7}
    for name, value in (contradicting | kept | {"max_length": 30}).items():
        setattr(model.generation_config, name, value)
    assert hf_kvret.ask(model, tokenizer, cache, QUESTION, max_new_tokens=3) == expected
    plain, dropped = plain_generation_config(model)
    assert {*dropped} == {*contradicting}
    assert all(getattr(plain, name) == value for name, value in kept.items())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_text_beyond_the_models_positions_is_warned_of(name: str, capsys: Capture) -> None:
    model = MODELS[name].build()
    most, is_table = positions(model)
    assert most == model.config.max_position_embeddings and is_table == (name == "gpt2")
    subject = Subject(name, model, None)
    command._check_positions(subject, most)
    assert not capsys.readouterr().err
    command._check_positions(subject, most - 9, 10)
    assert f"{most - 9:,} tokens and up to 10 of an answer" in capsys.readouterr().err
    fact = f"{most + 1:,} tokens, and the model has {most:,}"
    with pytest.raises(ValueError, match=fact) if is_table else nullcontext():
        command._check_positions(subject, most + 1)
    assert (fact in capsys.readouterr().err) == (not is_table)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_question_stands_behind_the_document_in_its_message(
    template: str | None, reference: Subject, monkeypatch: Patch
) -> None:
    tokenizer = reference.need_tokenizer("a test")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    ids = hf_kvret.document_ids(tokenizer, TEXT)
    cache = _cache(reference.model, ids)
    asked: list[torch.Tensor] = []
    generate = reference.model.generate

    def noted(prompt: torch.Tensor, **options: Any) -> Any:
        asked.append(prompt)
        return generate(prompt, **options)

    monkeypatch.setattr(reference.model, "generate", noted)
    answers = {
        hf_kvret.ask(reference.model, tokenizer, cache, QUESTION, max_new_tokens=8)
        for _ in range(2)
    }
    assert len(answers) == 1 and cache.get_seq_length() == ids.shape[1]
    shown = tokenizer.decode(asked[0][0], skip_special_tokens=True)
    message = f"{TEXT}\n\n{QUESTION}"
    around = ("<user>", "</user><assistant>") if template else ("", "\n")
    assert shown.endswith(message + around[1]) and around[0] in shown[: len(around[0]) + 1]


@pytest.mark.parametrize(
    ("parts", "strips"), [(False, ""), (True, " | trim"), (False, ".lstrip()")]
)
def test_a_document_begins_a_later_chat(
    strips: str, parts: bool, reference: Subject, monkeypatch: Patch
) -> None:
    """Also where the template reads a list of parts, and strips what stands around a message."""
    shown = "{{ m.content }}"
    if parts:
        shown = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    template = TEMPLATE.replace("{{ m.content }}", shown.replace(" }}", f"{strips} }}}}"))
    tokenizer = reference.need_tokenizer("a test")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for text in (f"\n\n    {TEXT}", f"{TEXT}  \n"):
        [ids] = hf_kvret.document_ids(tokenizer, text).tolist()
        for behind in ("", f"\n\n{QUESTION}"):
            content: Any = text + behind
            content = [{"type": "text", "text": content}] if parts else content
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            whole = tokenizer(chat, add_special_tokens=False)["input_ids"]
            # Blanks at the border may be one token with those of the question.
            assert whole[: len(ids) - 2] == ids[:-2]


def test_layers_that_can_not_go_back_are_asked_twice(reference: Subject) -> None:
    tokenizer = reference.need_tokenizer("a test")
    model: Any = MODELS["gemma3"].build()
    ids = torch.randint(8, 128, (1, 70))
    cache, before = _cache(model, ids), None
    for _ in range(2):
        more = {"max_new_tokens": 4, "streamer": None}
        with Patch.context() as patch:
            patch.setattr("hf_kvret.shelf.questions._encode", lambda *_: [9, 10, 11])
            answer = hf_kvret.ask(model, tokenizer, cache, "Why?", **more)
        assert before in (None, answer)
        before = answer


def test_bad_questions_are_refused(reference: Subject, monkeypatch: Patch) -> None:
    tokenizer, model = reference.need_tokenizer("a test"), reference.model
    empty = ParisKVCache(model.config)
    with pytest.raises(ValueError, match="doesn't hold one document"):
        hf_kvret.ask(model, tokenizer, empty, QUESTION)
    cache = _cache(model, hf_kvret.document_ids(tokenizer, TEXT[:400]))
    with pytest.raises(ValueError, match="no question"):
        hf_kvret.ask(model, tokenizer, cache, " ")
    for options in ({"num_beams": 2}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match=r"one answer of one beam|has a cache of its own"):
            hf_kvret.ask(model, tokenizer, cache, QUESTION, **options)
    with pytest.raises(TypeError, match="DynamicCache: pass one of hf_kvret"):
        hf_kvret.ask(model, tokenizer, DynamicCache(config=model.config), QUESTION)  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].role }}")
    with pytest.raises(ValueError, match="doesn't show a message"):
        hf_kvret.ask(model, tokenizer, cache, QUESTION)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    for act in (
        lambda: hf_kvret.ask(model, tokenizer, cache, QUESTION),
        lambda: hf_kvret.document_ids(tokenizer, TEXT),
    ):
        with pytest.raises(ValueError, match=r"template of '.*reference_llama' .*no system role"):
            act()


def test_texts_are_read_from_files_and_pipes(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbf# One\r\ntwo")
    assert document_text(tmp_path / "a.md") == "# One\ntwo"
    for name in ("-", "pipe"):
        reader, writer = os.pipe()
        os.write(writer, TEXT.encode())
        os.close(writer)
        with open(reader, "rb") as file:
            monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
            path = Path("-" if name == "-" else f"/dev/fd/{reader}")
            assert document_text(path) == TEXT and is_stream(path)


def test_only_text_is_read(tmp_path: Path, program: Any) -> None:
    for content, message in ((b"\xff", "not UTF-8"), (b" \n", "no text in it"), (b"a\0", "null")):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            document_text(tmp_path / "a.txt")
    (tmp_path / "a.html").write_text("<p>Text.</p>")
    with pytest.raises(ValueError, match="is no plain text: save it as text"):
        document_text(tmp_path / "a.html")
    assert "no file" in program("read", tmp_path / "none.txt", status=2).err
    (tmp_path / "a.txt").write_text("Hi")
    assert "a shelf holds 64 and more" in program("read", tmp_path / "a.txt", status=2).err
