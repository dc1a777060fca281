"""``hf-kvret read``, ``ask`` and ``shelf``, and questions from Python."""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret import ParisKVCache, Shelf
from hf_kvret.cli import main
from hf_kvret.commands import documents as command
from hf_kvret.commands.document_text import document_text, is_stream
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
def _short(monkeypatch: pytest.MonkeyPatch, subjects: Callable[..., Subject]) -> None:
    """Chunks of which a short document has several."""
    monkeypatch.setattr(command, "_CHUNK", 128)
    monkeypatch.setattr(command, "_LEAST_CHUNK", 64)
    monkeypatch.setattr(command, "load_subject", subjects)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "kings.txt"
    path.write_text(TEXT)
    return path


def _read(document: Path, folder: Path, *more: str) -> int:
    words = ["read", str(document), "--model", "reference", "--method", METHOD]
    return main([*words, "--shelf", str(folder), *more])


def _cache(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> ParisKVCache:
    cache = ParisKVCache(model.config, **{**COVERING_OPTIONS, **options})
    generate: Any = model.generate
    generate(ids, past_key_values=cache, max_new_tokens=1)
    return cache


def test_a_document_is_read_once_and_asked_about(
    reference: Subject, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf, tokenizer = tmp_path / "shelf", reference.need_tokenizer("a test")
    assert _read(document, shelf) == 0
    ids = hf_kvret.document_ids(tokenizer, TEXT)
    count = ids.shape[1]
    assert f"read {count:,} of {count:,} tokens" in capsys.readouterr().out
    asks = ["ask", "kings", QUESTION, "--shelf", str(shelf), "--new-tokens", "9"]
    assert main([*asks, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    behind = tokenizer(f"\n\n{QUESTION}\n", add_special_tokens=False)["input_ids"]
    prompt = torch.cat([ids, torch.tensor([behind])], dim=1)
    model: Any = reference.model
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False)[0, prompt.shape[1] :]
    assert report["answer"] == tokenizer.decode(expected, skip_special_tokens=True).strip()
    assert report["tokens"] == count
    assert main(asks) == 0
    assert report["answer"] in capsys.readouterr().out
    assert _read(document, shelf) == 0
    assert f"all {count:,} tokens are on" in capsys.readouterr().out
    assert _read(document, shelf, "--name", "other") == 0
    assert f"read 1 of {count:,} tokens" in capsys.readouterr().out
    [entry] = Shelf(shelf).entries()
    assert entry.title == "other", "one title each"


@pytest.mark.parametrize("moment", ["layer", "head", "put"])
def test_what_was_read_before_an_interrupt_is_kept(
    moment: str,
    subjects: Callable[..., Subject],
    document: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a pass, behind its last layer, or while all is written."""
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model: Any = subjects("reference", torch.float32, "cpu").model
    with ExitStack() as stack:
        if moment == "put":
            calls += [1, 1]
            put = Shelf.put
            monkeypatch.setattr(Shelf, "put", lambda *args: [count(), put(*args)][1])
        else:
            part = model.model.layers[2] if moment == "layer" else model.lm_head
            stack.callback(part.register_forward_pre_hook(count).remove)
        with pytest.raises(KeyboardInterrupt):
            _read(document, tmp_path / "shelf")
    kept = "256" if moment != "put" else ""
    assert f"{kept} tokens were kept" in capsys.readouterr().err
    [entry] = Shelf(tmp_path / "shelf").entries()
    assert entry.tokens == 256 or moment == "put"
    assert _read(document, tmp_path / "shelf", "--name", "kings") == 0
    whole = Shelf(tmp_path / "shelf").entry("kings")
    new = 1 if moment == "put" else whole.tokens - 256
    assert f"read {new:,} of" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
@pytest.mark.parametrize("moment", ["layer", "head"])
def test_models_that_can_not_go_back_begin_again(
    name: str, moment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    command._keep_part(shelf, cache, ids, Subject(name, model, None))
    assert "nothing was kept, the same command begins again: " in capsys.readouterr().err
    assert not shelf.entries()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_signal_in_a_chunk_keeps_whole_ones(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where windows that are full can't go back, it waits for the end of the chunk."""
    model: Any = MODELS[name].build()
    hf_kvret.attach(model)
    ids, shelf, calls = prompt(1, 500), Shelf(tmp_path), []
    cache = ParisKVCache(model.config, **COVERING_OPTIONS)

    def hang_up(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGHUP)

    model.model.layers[1].mlp.register_forward_pre_hook(hang_up)
    # Under nohup it would be ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with interruptible(signal.SIGHUP), pytest.raises(KeyboardInterrupt):
        command._read(Subject(name, model, None), cache, ids, name)
    command._keep_part(shelf, cache, ids, Subject(name, model, None))
    kept = 256 if name == "llama" else 384
    signal.signal(signal.SIGHUP, before)
    assert f"{kept} tokens were kept" in capsys.readouterr().err
    assert [entry.tokens for entry in shelf.entries()] == [kept]


@pytest.mark.parametrize("store", ["resident", "higgs"])
def test_what_is_larger_than_the_shelf_is_not_read(
    store: str,
    reference: Subject,
    document: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, folder = f"{METHOD}:store={store}", tmp_path / "shelf"
    assert _read(document, folder, "--method", method) == 0
    [entry] = Shelf(folder).entries()
    Shelf(folder).remove(entry.name)
    # An estimate refuses nothing that there is a place for.
    options = command.ReadOptions(document, method=method)
    command._check_size(options, Shelf(folder, entry.nbytes), reference, entry.tokens)
    monkeypatch.delattr(command, "_read")
    assert _read(document, folder, "--method", method, "--max-size", "100KB") == 2
    said = capsys.readouterr().err
    assert "446 tokens, which take" in said and "give a larger --max-size" in said


@pytest.mark.parametrize("template", [None, TEMPLATE.replace("</{{ m.role }}>", "</s>")])
def test_control_tokens_of_strangers_are_text(
    template: str | None, reference: Subject, monkeypatch: pytest.MonkeyPatch
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


def test_a_shelf_is_listed_checked_and_cleared(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = ["--shelf", str(tmp_path / "shelf")]
    assert main(["shelf", "list", *shelf]) == 0
    assert "nothing is on" in capsys.readouterr().out
    assert _read(document, tmp_path / "shelf", "--name", "a") == 0
    capsys.readouterr()
    assert main(["shelf", "list", *shelf, "--json"]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert (facts["title"], facts["method"], facts["dtype"]) == ("a", "paris", "float32")
    for action, expected in (("inspect", "tokens: "), ("verify", "whole"), ("remove", "removed a")):
        assert main(["shelf", action, "--name", "a", *shelf]) == 0
        assert expected in capsys.readouterr().out
    assert main(["shelf", "remove", "--name", "a", *shelf]) == 2
    assert "no entry 'a', it has nothing" in capsys.readouterr().err
    assert main(["shelf", "remove", *shelf]) == 2
    assert "give --name" in capsys.readouterr().err
    assert main(["ask", "a", "Why?", *shelf]) == 2


def test_of_documents_with_one_name_the_newest_is_asked_about(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shelf"
    shelf, place = Shelf(folder), ["--shelf", str(folder)]
    names = []
    for text in (TEXT, TEXT.replace("ships", "boats"), TEXT):
        document.write_text(text)
        assert _read(document, folder) == 0
        names.append(shelf.entry("kings").name)
        old = next((one for one in shelf.entries() if one.name != names[-1]), None)
        if old is not None:
            # A use makes no document newer.
            shelf.load(old.name, load_subject("reference").model)
            assert shelf.entry("kings").name == names[-1]
    newest, other, again = names
    assert newest == again != other
    capsys.readouterr()
    assert main(["ask", "kings", QUESTION, *place, "--json", "--new-tokens", "2"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["entry"] == newest and json.loads(said.out)["others"] == [other]
    assert f"2 documents are called kings: this is {newest}" in said.err
    assert main(["shelf", "inspect", "--name", "kings", *place]) == 0
    assert f"name: {newest}" in capsys.readouterr().out
    assert main(["shelf", "remove", "--name", "kings", *place]) == 2
    assert f"give the name of one, {newest}, {other}" in capsys.readouterr().err
    assert main(["shelf", "remove", "--name", other, *place]) == 0
    assert main(["shelf", "remove", "--name", "kings", *place]) == 0
    assert not shelf.entries()


def test_names_are_shown_escaped(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, title = tmp_path / "a\x1bb", "a|b\nc\x1b[31m"
    shown, place = title.encode("unicode_escape").decode(), ["--shelf", str(folder)]
    assert _read(document, folder, "--name", title) == 0
    assert main(["shelf", "list", *place]) == 0
    *_, header, _, row = (said := capsys.readouterr()).out.strip().splitlines()
    assert shown.replace("|", "\\|") in row
    assert row.replace("\\|", "").count("|") == header.count("|")
    # As it is shown, it can be asked for.
    assert main(["shelf", "inspect", "--name", shown, *place]) == 0
    assert main(["ask", shown, QUESTION, *place, "--new-tokens", "2"]) == 0
    assert main(["read", str(tmp_path / "no\x1bfile"), *place]) == 2
    assert main(["shelf", "remove", "--name", title, *place]) == 0
    assert "\x1b" not in said.out + said.err + "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "defaults",
    [
        {"cache_implementation": "static"},
        {"use_cache": False, "output_attentions": True},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0},
        {"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"max_length": 30, "min_new_tokens": 7, "forced_eos_token_id": 5},
        {"dola_layers": "low", "token_healing": True, "guidance_scale": 2.0},
        {"stop_strings": ["ships"], "repetition_penalty": 1.0},
    ],
    ids=lambda one: next(iter(one)),
)
def test_defaults_of_a_model_do_not_contradict_a_question(
    defaults: dict[str, Any], reference: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model = reference.need_tokenizer("a test"), reference.model
    cache = _cache(model, hf_kvret.document_ids(tokenizer, TEXT))
    expected = hf_kvret.ask(model, tokenizer, cache, QUESTION, max_new_tokens=4)
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    for name, value in defaults.items():
        setattr(model.generation_config, name, value)
    assert hf_kvret.ask(model, tokenizer, cache, QUESTION, max_new_tokens=4) == expected
    plain, dropped = plain_generation_config(model)
    kept = {"top_k", "stop_strings", "repetition_penalty"}
    assert {*dropped} == {*defaults} - kept - {"max_length"}
    assert all(getattr(plain, name) == defaults[name] for name in kept & defaults.keys())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_of_the_model_are_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS[name].build()
    most, is_table = positions(model)
    assert most == model.config.max_position_embeddings and is_table == (name == "gpt2")
    subject = Subject(name, model, None)
    command._check_positions(subject, most)
    assert not capsys.readouterr().err
    command._check_positions(subject, most - 9, 10)
    assert f"{most - 9:,} tokens and up to 10 of an answer" in capsys.readouterr().err
    if is_table:
        with pytest.raises(ValueError, match=f"{most + 1:,} tokens, and the model has {most:,}"):
            command._check_positions(subject, most + 1)
    else:
        command._check_positions(subject, most + 1)
        assert f"{most + 1:,} tokens, and the model has {most:,}" in capsys.readouterr().err


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_question_stands_behind_the_document_in_its_message(
    template: str | None, reference: Subject, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("strips", ["", " | trim", ".lstrip()", ".strip('\\n')"])
def test_a_document_begins_a_later_chat(
    strips: str, parts: bool, reference: Subject, monkeypatch: pytest.MonkeyPatch
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_kvret.shelf.questions._encode", lambda *_: [9, 10, 11])
            answer = hf_kvret.ask(model, tokenizer, cache, "Why?", **more)
        assert before in (None, answer)
        before = answer


def test_bad_questions_are_refused(reference: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = reference.need_tokenizer("a test"), reference.model
    empty = ParisKVCache(model.config)
    with pytest.raises(ValueError, match="doesn't hold one document"):
        hf_kvret.ask(model, tokenizer, empty, QUESTION)
    cache = _cache(model, hf_kvret.document_ids(tokenizer, TEXT[:400]))
    with pytest.raises(ValueError, match="no question"):
        hf_kvret.ask(model, tokenizer, cache, " ")
    with pytest.raises(ValueError, match="one answer of one beam"):
        hf_kvret.ask(model, tokenizer, cache, QUESTION, num_beams=2)
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


def test_texts_markdown_and_pages_are_read(tmp_path: Path) -> None:
    head = "<html><head><title>T</title></head>"
    page = f"{head}<body><script>x()</script><p>One\n<b>two</b></p>three</body>"
    files = {"a.txt": b"\xef\xbb\xbfOne\r\ntwo", "a.md": b"# One\ntwo", "a.html": page.encode()}
    expected = {"a.txt": "One\ntwo", "a.md": "# One\ntwo", "a.html": "One two\nthree"}
    for name, content in files.items():
        if name == "a.html" and not find_spec("bs4"):
            continue
        for encoding in (None, "utf-16", "utf-32"):
            recoded = content.decode("utf-8-sig").encode(encoding) if encoding else content
            (tmp_path / name).write_bytes(recoded)
            assert document_text(tmp_path / name, 1000) == expected[name]
    for mark in ("utf_16_be", "utf_32_be"):
        (tmp_path / "a.txt").write_bytes(("\ufeff" + TEXT).encode(mark))
        assert document_text(tmp_path / "a.txt", 20_000) == TEXT


@pytest.mark.parametrize("name", ["-", "pipe"])
def test_a_pipe_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = f"<!doctype html>\n<p>{TEXT}</p>".encode() if find_spec("bs4") else TEXT.encode()
    for content, most in ((TEXT.encode(), 20_000), (page, 20_000), (TEXT.encode(), 100)):
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
        with open(reader, "rb") as file:
            monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
            path = Path("-" if name == "-" else f"/dev/fd/{reader}")
            if most == 100:
                with pytest.raises(ValueError, match="more than 100 bytes"):
                    document_text(path, most)
            else:
                assert document_text(path, most).split() == TEXT.split()
                assert is_stream(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x" * 101, "more than 100 bytes"),
        ("a.pdf", b"x", "is no text"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.txt", b"\xff\xfea", "not UTF-16"),
        ("a.txt", b" \n", "no text in it"),
        ("a.txt", b"a\0b", "null characters"),
    ],
)
def test_what_is_no_text_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        document_text(tmp_path / name, 100)
    with pytest.raises(FileNotFoundError):
        document_text(tmp_path / "none.txt", 100)


@pytest.mark.parametrize(
    ("more", "message"), [(["--method", "full"], "only caches of hf-kvret"), (["--shelf", "f"], "")]
)
def test_bad_options_of_read_are_told(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none.txt")
    document = tmp_path / "a.txt"
    document.write_text("words")
    if message:
        assert main(["read", str(document), *more]) == 2
        assert message in capsys.readouterr().err
    else:
        assert main(["read", missing, *more]) == 2
        assert "no file" in capsys.readouterr().err
