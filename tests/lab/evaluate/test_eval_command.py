"""All of ``hf-kvret eval``: models by name, common options, texts, artifacts, clear errors."""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.evaluate.tasks.niah import percent
from hf_kvret.lab.evaluate.texts import read_text
from hf_kvret.lab.program.arguments import (
    budget,
    known_names,
    lengths,
    names,
    one_or_both,
    whole_number,
)


def test_values_of_options_are_read() -> None:
    assert lengths("512,4K, 1m") == (512, 4096, 1_048_576)
    assert names(" full, paris:top_k=3 ,") == ["full", "paris:top_k=3"]
    assert (budget("256"), budget("0.04")) == (256, 0.04)
    assert [percent(text) for text in ("0", " 12.5", "100")] == [0, 12.5, 100]
    both, known = one_or_both("inside", "after"), known_names(("qa", "vt"))
    assert (both("both"), known("vt")) == (("inside", "after"), ("vt",))
    wrong = {lengths: ("", "4G", "0", "-1", "4K,,8K", "4K,4096"), percent: ("", "-1", "101", "nan")}
    wrong |= {both: ("x",), known: ("vt,x", "vt,vt"), whole_number(0): ("-1", "x")}
    for read, texts in wrong.items():
        for bad in texts:
            with pytest.raises(argparse.ArgumentTypeError):
                read(bad)


def test_a_model_that_is_none_is_named(tmp_path: Path, tiny_text: Path, program: Any) -> None:
    words = ["eval", "ppl", "--text", tiny_text, "--model"]
    assert "can't be loaded" in program(*words, tmp_path / "none", status=2).err
    (tmp_path / "config.json").write_text("{}")
    assert "can't be loaded" in program(*words, tmp_path, status=2).err
    assert "required: --text" in program("eval", "ppl", status=2).err


def test_a_subject_names_its_weights_and_its_configuration(tiny_model_dir: Path) -> None:
    subject = load_subject(str(tiny_model_dir))
    described = subject.describe()
    assert described["class"] == "LlamaForCausalLM" and described["dtype"] == "float32"
    theta = subject.model.config.rope_parameters["rope_theta"]
    subject.model.config.rope_parameters["rope_theta"] = 2 * theta
    assert subject.describe()["fingerprint"] != described["fingerprint"]
    subject.model.config.rope_parameters["rope_theta"] = theta
    assert subject.describe() == described
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
    for wrong in ("{", r'"half of a pair: \ud800"'):
        listed.write_text(wrong)
        with pytest.raises(ValueError, match="is not JSON of text"):
            read_text(listed)
    plain.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text(plain)


# Each is named before the first cell is run, also where only the last one is wrong.
MISTAKES = {
    "ppl --text missing.txt": "--text missing.txt: no such file",
    "ppl --text TEXT --model needle": "needs a tokenizer",
    "ppl --text TEXT --caches x": "unknown cache 'x'",
    "ppl --text TEXT --context 64 --caches full,flat --step 33": "--step 33: beyond max_draft (32)",
    "ppl --text TEXT --context 64 --caches ctkvr --step 2": "--step 2: ctkvr learns from queries",
    "agreement --text TEXT --context 64,1M": "fewer than the 1048576 of a window: give a shorter",
    "niah --context 2K,40": "--context 40 is too short",
    "niah --model needle --essays TEXT": "is text, and needle is asked in token ids",
    "niah --context 2K --caches full,a2ats": "artifact",
    "ruler --tasks niah_single_2": "task niah_single_2 needs --essays FILE",
    "ruler --tasks niah_single_1 --context 2K,20": "length=20 is too short for task",
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.items())
def test_a_mistake_is_one_line_before_any_work(
    command: str, message: str, tiny_model_dir: Path, tiny_text: Path, tmp_path: Path, program: Any
) -> None:
    task, *options = [tiny_text if word == "TEXT" else word for word in command.split()]
    output = tmp_path / "x.json"
    arguments = ["--model", tiny_model_dir, "--caches", "full", "--json", output]
    shown = program("eval", task, *arguments, *options, status=2)
    *loading, error = shown.err.splitlines()
    assert error.startswith("hf-kvret: error: ") and message in error
    assert [line[:17] for line in loading] in ([], ["loading the model"])
    assert not shown.out and not output.exists()


def test_a_model_of_text_without_a_tokenizer_is_refused(
    tiny_model_dir: Path, tmp_path: Path, program: Any
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model_dir, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    # The vocabulary has the size of the needle language, but other ids.
    config = LlamaForCausalLM.from_pretrained(bare).config
    config.vocab_size = 512
    LlamaForCausalLM(config).save_pretrained(bare)
    for name in ("niah", "multiturn"):
        error = program("eval", name, "--model", bare, "--context", "2K", status=2).err
        assert f"{name} needs a tokenizer" in error
        assert "put the tokenizer's files (tokenizer.json) into the model's folder" in error
    (bare / "tokenizer.json").write_text("{")
    assert "has none (" in program("eval", "niah", "--model", bare, status=2).err


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """``eval niah`` with a copy of the bundled model's artifact, results in ``r.json``."""
    shutil.copytree(BUNDLED_MODEL / "a2ats", tmp_path / "words")
    small = f"a2ats:artifact={tmp_path / 'words'}:dense_below=0:recent=16:flush=16"
    options = ["--context", "256", "--depths", "50", "--samples", "1", "--answer-tokens", "2"]
    return ["eval", "niah", "--caches", small, *options, "--json", str(tmp_path / "r.json")]


def test_rows_of_two_artifacts_at_one_path_are_not_mixed(
    arguments: list[str], tmp_path: Path, program: Any
) -> None:
    words = [*arguments, "--model", "needle"]
    program(*words)
    file, folder = tmp_path / "r.json", tmp_path / "words"
    before = json.loads(file.read_text())
    artifact = CalibrationArtifact.from_pretrained(folder)
    assert [entry["result"]["artifact"] for entry in before["cells"]] == [artifact.sha256]
    replace(artifact, data={"text": "another"}).save_pretrained(folder)
    # With nothing left to measure the table is shown as it was.
    assert "1 cells were finished already" in program(*words).out
    error = program(*words, "--depths", "0,50", status=2).err
    assert f"with another artifact (sha256 {artifact.sha256}, now" in error
    assert "give another --json, delete the file, or bring the artifact back" in error
    assert json.loads(file.read_text()) == before
    artifact.save_pretrained(folder)
    program(*words, "--depths", "0,50")
    assert len(json.loads(file.read_text())["cells"]) == 2
