"""All of ``hf-kvret eval``: models by name, common options, texts, artifacts, clear errors."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.evaluate import task
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.evaluate.tasks.ppl import Perplexity
from hf_kvret.lab.evaluate.texts import chat_parts, read_text
from hf_kvret.lab.program.arguments import budget, lengths, names


def test_lengths_and_names_are_read() -> None:
    assert lengths("512,4K, 1m") == (512, 4096, 1_048_576)
    assert names(" full, paris:top_k=3 ,") == ["full", "paris:top_k=3"]
    assert (budget("256"), budget("0.04")) == (256, 0.04)
    for bad in ("", "4G", "0", "-1", "4K,,8K", "4K,4096"):
        with pytest.raises(argparse.ArgumentTypeError):
            lengths(bad)


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["eval", "ppl", *arguments]) == 2
    return capsys.readouterr().err


def test_a_model_that_is_none_is_named(
    tmp_path: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = _error(capsys, "--text", str(tiny_text), "--model", str(tmp_path / "none"))
    assert "no such folder, and no hub id either (owner/name)" in message
    (tmp_path / "config.json").write_text("{}")
    assert "can't be loaded" in _error(capsys, "--text", str(tiny_text), "--model", str(tmp_path))


def test_an_unknown_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "nothing"])
    assert stopped.value.code == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_a_subject_names_its_weights(tiny_model_dir: Path) -> None:
    subject = load_subject(str(tiny_model_dir))
    described = subject.describe()
    assert described["class"] == "LlamaForCausalLM" and described["dtype"] == "float32"
    subject.model.get_input_embeddings().weight.data[0, 0] += 1
    assert subject.describe()["fingerprint"] != described["fingerprint"]
    assert load_subject("needle").tokenizer is None


def test_texts_are_read_from_plain_files_and_json(tmp_path: Path) -> None:
    plain, listed, empty = (tmp_path / name for name in ("a.txt", "b.json", "c.txt"))
    plain.write_text("one two")
    listed.write_text('[{"text": "one"}, "two"]')
    empty.write_text("  \n")
    assert read_text(plain) == "one two"
    assert read_text(listed) == "one\n\ntwo"
    with pytest.raises(ValueError, match="has no text"):
        read_text(empty)
    listed.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_text(listed)
    plain.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text(plain)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--json", "", "is a folder: give a file in it"),
        ("--table", "", "is a folder"),
        ("--plot", "a.bad", "must end in .png, .svg, .pdf"),
        ("--json", "file/x.json", "--json"),
    ],
)
def test_outputs_are_looked_at_before_the_work(
    option: str,
    value: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(task, "load_subject", lambda *given: pytest.fail("work has begun"))
    error = _error(capsys, "--text", "t.txt", "--model", "m", option, str(tmp_path / value))
    assert message in error


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["eval", "ppl", "--text", "t"], ["bench", "decode"], ["demo"]):
        with pytest.raises(SystemExit):
            main([*words, "--device", "abacus"])
        assert "'abacus' is no device" in capsys.readouterr().err


def test_a_cell_without_memory_is_told_and_the_others_run(
    tiny_model_dir: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Perplexity.run

    def scarce(self: Perplexity, cell: dict, *rest: object) -> dict:
        if cell["cache"] == "static":
            raise torch.OutOfMemoryError("tried to allocate too much")
        return run(self, cell, *rest)

    monkeypatch.setattr(Perplexity, "run", scarce)
    file = tmp_path / "ppl.json"
    words = ["--text", str(tiny_text), "--model", str(tiny_model_dir), "--context", "64"]
    more = ["--windows", "1", "--caches", "static,full", "--json", str(file)]
    assert main(["eval", "ppl", *words, *more]) == 1
    printed = capsys.readouterr().out
    assert "static 64: out of memory (tried to allocate too much)" in printed
    assert [entry["cell"]["cache"] for entry in json.loads(file.read_text())["cells"]] == ["full"]


def test_what_was_finished_is_shown_when_a_later_cell_fails(
    tiny_model_dir: Path,
    tiny_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Perplexity.run

    def scarce(self: Perplexity, cell: dict, *rest: object) -> dict:
        if cell["length"] == 128:
            raise OSError("the disk is gone")
        return run(self, cell, *rest)

    monkeypatch.setattr(Perplexity, "run", scarce)
    words = ["--text", str(tiny_text), "--model", str(tiny_model_dir), "--windows", "1"]
    assert main(["eval", "ppl", *words, "--context", "64,128", "--caches", "full"]) == 2
    shown = capsys.readouterr()
    assert "| full  | 64" in shown.out and "the disk is gone" in shown.err


# Files of a mistake by name; TEXT is one of 6,000 tokens.
FILES = {
    "EMPTY": ("e.txt", " \n\n"),
    "LONG": ("l.txt", "The grass is green. " * 20_000),
    "DICT": ("d.json", '{"a": 1}'),
    "BROKEN": ("b.json", "["),
}
# Each is named before the first cell is run, also where only the last one is wrong.
MISTAKES = {
    "ppl --text missing.txt": "--text missing.txt: no such file",
    "ppl --text EMPTY": "has no text in it",
    "ppl --text TEXT --context 64,1M": "fewer than the 1048576 of a window",
    "ppl --text LONG --context 64,70000": "70000 tokens, but the model knows 65536 positions",
    "ppl --text TEXT --context 4": "--context 4: a window needs at least 8 tokens",
    "ppl --text TEXT --model needle": "needs a tokenizer",
    "ppl --text TEXT --caches x": "unknown cache 'x'",
    "ppl --text TEXT --device cuda": "no CUDA device",
    "ppl --text TEXT --context 64 --caches full,flat --step 33": "--step 33: beyond max_draft (32)",
    "ppl --text TEXT --context 64 --caches ctkvr --step 2": "--step 2: ctkvr learns from queries",
    "agreement": "give either --text FILE or --prompts FILE",
    "agreement --text TEXT --prompts TEXT": "give either --text FILE or --prompts FILE",
    "agreement --text missing.txt": "--text missing.txt: no such file",
    "agreement --prompts missing.txt": "--prompts missing.txt: no such file",
    "agreement --text TEXT --context 64,1M": "fewer than the 1048576 of a window: give a shorter",
    "agreement --text TEXT --context 64 --new-tokens 70000": "the model knows 65536 positions",
    "agreement --text TEXT --model needle": "needs a tokenizer",
    "agreement --prompts EMPTY": "has no prompt in it",
    "agreement --prompts DICT": "give a JSON list of strings",
    "agreement --prompts BROKEN": "Expecting",
    "niah --needle x": "are texts of --style sandwich",
    "niah --style sandwich --answer=": "none may be empty",
    "niah --style sandwich --distractors 2": "one sandwich only",
    "niah --style tokens": "use --style magic",
    "niah --essays missing.txt": "--essays missing.txt: no such file",
    "niah --style magic --context 2K,100K": "the model knows 65536 positions",
    "niah --style magic --context 2K,40": "--context 40 is too short",
    "niah --model needle --style magic": "needs a tokenizer",
    "niah --model needle --style sandwich": "needs a tokenizer",
    "niah --model needle --essays TEXT": "is text, and --style tokens",
    "niah --context 2K --caches full,a2ats": "artifact",
    "multiturn --mode forks --own-answers": "forks forget every answer",
    "multiturn --style tokens": "use --style magic",
    "multiturn --essays missing.txt": "--essays missing.txt: no such file",
    "multiturn --context 2K,100K": "the model knows 65536 positions",
    "multiturn --context 2K,64": "--context 64 is too short",
    "multiturn --model needle --essays TEXT": "is text, and --style tokens",
    "ruler --tasks niah_single_2": "task niah_single_2 needs --essays FILE",
    "ruler --tasks qa_1 --squad missing.json": "--squad missing.json: no such file",
    "ruler --tasks vt --context 2K,100K": "the model knows 65536 positions",
    "ruler --tasks niah_single_1 --context 2K,20": "length=20 is too short for task",
    "ruler --tasks vt --chat": "has no chat template",
    "ruler --tasks vt --model needle": "ruler needs a tokenizer",
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.items())
def test_a_mistake_is_one_line_before_any_work(
    command: str,
    message: str,
    tiny_model_dir: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {"TEXT": tiny_text}
    for name, (file, content) in FILES.items():
        paths[name] = tmp_path / file
        paths[name].write_text(content)
    task, *options = [str(paths.get(word, word)) for word in command.split()]
    output = tmp_path / "x.json"
    arguments = ["--model", str(tiny_model_dir), "--caches", "full", "--json", str(output)]
    assert main(["eval", task, *arguments, *options]) == 2
    shown = capsys.readouterr()
    *loading, error = shown.err.splitlines()
    assert error.startswith("hf-kvret: error: ") and message in error
    assert [line[:17] for line in loading] in ([], ["loading the model"])
    assert not shown.out and not output.exists()


def test_a_model_of_text_without_a_tokenizer_is_refused(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model_dir, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    # The vocabulary has the size of the needle language, but other ids.
    config = LlamaForCausalLM.from_pretrained(bare).config
    config.vocab_size = 512
    LlamaForCausalLM(config).save_pretrained(bare)
    for name in ("niah", "multiturn"):
        assert main(["eval", name, "--model", str(bare), "--context", "2K"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{name} needs a tokenizer" in error
        assert "put the tokenizer's files (tokenizer.json) into the model's folder" in error
    assert main(["eval", "niah", "--model", str(bare), "--style", "tokens"]) == 2
    assert "needs a tokenizer" in capsys.readouterr().err
    tokenizer = bare / "tokenizer.json"
    tokenizer.write_text("{")
    assert main(["eval", "niah", "--model", str(bare), "--style", "magic"]) == 2
    assert "has none (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", "{"),
        ("config.json", "[" * 100_000),
        ("model.safetensors", "short"),
        ("model.safetensors", ""),
    ],
)
def test_broken_files_of_a_model_are_one_line(
    name: str,
    content: str,
    tiny_model_dir: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_dir, broken)
    (broken / name).write_text(content)
    error = _error(capsys, "--text", str(tiny_text), "--model", str(broken)).splitlines()[-1]
    assert error.startswith(f"hf-kvret: error: --model {broken}: can't be loaded (")


def test_chat_parts_surround_the_message(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with pytest.raises(ValueError, match="no chat template"):
        chat_parts(tokenizer)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    assert chat_parts(tokenizer) == ("[", "]>")
    tokenizer.chat_template = "nothing"
    with pytest.raises(ValueError, match="doesn't show a message"):
        chat_parts(tokenizer)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """``eval niah`` with a copy of the bundled model's artifact, results in ``r.json``."""
    shutil.copytree(BUNDLED_MODEL / "a2ats", tmp_path / "words")
    small = f"a2ats:artifact={tmp_path / 'words'}:dense_below=0:recent=16:flush=16"
    options = ["--context", "256", "--depths", "50", "--samples", "1", "--answer-tokens", "2"]
    return ["eval", "niah", "--caches", small, *options, "--json", str(tmp_path / "r.json")]


def test_the_artifact_of_another_tune_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "tuned")
    assert main([*arguments, "--model", str(tmp_path / "tuned")]) == 2
    assert "was made from other weights" in capsys.readouterr().err


def test_results_of_another_artifact_are_not_gone_on_with(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", "needle"]) == 0
    assert main([*arguments, "--model", "needle"]) == 0
    assert "1 cells were finished already" in capsys.readouterr().out
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "words")
    tensors = {name: x + 1 if "codewords" in name else x for name, x in artifact.tensors.items()}
    CalibrationArtifact(
        artifact.method, artifact.model, tensors, artifact.data, artifact.options
    ).save_pretrained(tmp_path / "words")
    assert main([*arguments, "--model", "needle"]) == 2
    assert "with another artifact" in capsys.readouterr().err
