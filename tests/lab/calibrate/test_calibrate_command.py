"""``hf-kvret calibrate``: options, sources, the hub, going on, one line for each mistake."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.command import make_corpus
from hf_kvret.lab.calibrate.command_options import A2ATSOptions, AquaOptions
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.program.options import add_options, read_options

from ...artifacts.artifact_folder import save_model, write_text

PAGE = Path(__file__).parents[3] / "docs" / "calibration.md"
SMALL = ("--codewords", "8", "--distance", "64", "--rounds", "3")
SHORT = ("--tokens", "400", "--length", "100", "--uuid-tokens", "100")


# Every option of AquaCalibration away from its default.
ALL_OTHER = {
    "bits": 3,
    "first_bits": "auto",
    "group": 8,
    "ridge": 0.5,
    "sinks": 2,
    "space": "after",
    "anchor_mean": True,
    "seed": 9,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers and the tokenizer of the reference model."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", config)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("texts") / "river.txt")


@pytest.fixture
def arguments(model_dir: Path, text: Path, tmp_path: Path) -> list[str]:
    """A whole command line that takes a second."""
    where = ["--model", str(model_dir), "--text", str(text), "--out", str(tmp_path / "out")]
    return ["calibrate", "a2ats", *where, *SMALL, *SHORT]


@pytest.fixture
def aqua_arguments(model_dir: Path, text: Path, tmp_path: Path) -> list[str]:
    """The same for AQUA-KV."""
    where = ["--model", str(model_dir), "--text", str(text), "--out", str(tmp_path / "out")]
    return ["calibrate", "aqua", *where, "--tokens", "400", "--length", "100"]


def aqua_options(*arguments: str) -> AquaOptions:
    parser = argparse.ArgumentParser()
    add_options(parser, AquaOptions)
    return read_options(AquaOptions, parser.parse_args(["--model", "m", "--out", "o", *arguments]))


def parsed(*arguments: str) -> A2ATSOptions:
    parser = argparse.ArgumentParser()
    add_options(parser, A2ATSOptions)
    return read_options(A2ATSOptions, parser.parse_args(arguments))


def failing(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "hf-kvret: error" in line]
    assert len(lines) == 1
    return lines[0]


def test_a_command_makes_an_artifact_of_the_model(
    arguments: list[str], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out'}" in shown and "plain score error" in shown
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out", method="a2ats")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    artifact.check(model.config)
    assert artifact.check_weights(model) > 5
    assert artifact.model.name == "tiny-llama"
    assert artifact.data["tokens"] == 400 and artifact.data["uuid_tokens"] == 100
    assert artifact.data["text"].startswith("river.txt ")
    assert artifact.data["held_out_sequences"] == 1
    assert artifact.tensors["layers.2.codewords"].shape == (2, 8, 16)
    # No path of this machine is shared with the artifact.
    for name in ("config.json", "README.md"):
        assert str(tmp_path.parent) not in (tmp_path / "out" / name).read_text()


def test_options_reach_the_artifact(arguments: list[str], tmp_path: Path) -> None:
    more = ["--plain", "--no-compare", "--space", "rotated", "--seed", "3", "--name", "me/it"]
    assert main([*arguments, *more, "--dtype", "bfloat16", "--held-out", "0"]) == 0
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out")
    result = {name: artifact.options[name] for name in ("space", "query_aware", "compare", "seed")}
    assert result == {"space": "rotated", "query_aware": False, "compare": False, "seed": 3}
    assert artifact.options["codewords"] == 8 and artifact.options["window"] == 64
    assert artifact.model.name == "me/it"
    assert all(row["score_error"] is None for row in artifact.quality)


def test_the_bundled_model_learns_from_its_own_language(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["calibrate", "a2ats", "--model", "needle", "--out", str(tmp_path / "out")]
    assert main([*where, *SMALL, "--tokens", "512", "--length", "128", "--no-compare"]) == 0
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out")
    assert artifact.data["documents"] == "needle language" and artifact.data["tokens"] == 512
    assert all(0 < row["score_error"] < 1 for row in artifact.quality)
    for more in (["--text", str(tmp_path / "a.txt")], ["--uuid-tokens", "2K"]):
        message = failing(capsys, [*where, *more])
        assert "leave --text, --dataset and --uuid-tokens out" in message


def test_the_held_out_text_is_the_end_of_the_text(model_dir: Path, text: Path) -> None:
    subject = load_subject(str(model_dir))
    base = ["--model", "m", "--out", "o", "--text", str(text)]

    def corpus(*more: str) -> Any:
        return make_corpus(parsed(*base, *SHORT, *more), subject)

    made = corpus()
    assert [len(ids) for ids in made.sequences] == [100] * 5
    words = subject.need_tokenizer("test").decode
    assert "The river" not in words(made.sequences[0])
    read = " ".join(words(ids) for ids in made.sequences[1:])
    assert read.index("1. The") < read.index("9. The")
    # A share of the text, at least one sequence and never all.
    assert [corpus("--held-out", share).held_out for share in ("0", "0.1", "0.5", "0.99")] == [
        0,
        1,
        2,
        3,
    ]
    few = r"--held-out 0\.1 of one sequence with 100 tokens: .* shorter --length or --held-out 0"
    with pytest.raises(ValueError, match=few):
        corpus("--tokens", "100")
    assert corpus("--tokens", "100", "--held-out", "0").held_out == 0
    assert len(corpus("--uuid-tokens", "0").sequences) == 4


def test_mistakes_are_one_line_each(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    for more, message in (
        (["--out", str(tmp_path / "file")], r"--out: no file can be written to .*file \("),
        (["--tokens", "1M"], r"--tokens 1048576: the text has \d+ tokens; give more text"),
        (["--codewords", "40000"], r"codewords=40000 must be at least 1 and at most 32768"),
        (
            ["--length", "2K", "--uuid-tokens", "2K", "--held-out", "0"],
            r"2048 tokens, but the model has 1024 pos",
        ),
        (["--length", "400"], r"--held-out 0\.1 of one sequence with 400 tokens: .* two sequences"),
        (["--push-to-hub", "a/b/c"], r"--push-to-hub a/b/c: no hub id, write user/name"),
        (["--private"], r"--private is of what --push-to-hub uploads"),
        (["--model", str(tmp_path / "none")], r"can't be loaded"),
    ):
        assert re.search(message, failing(capsys, [*arguments, *more])), more
    if not torch.cuda.is_available():
        assert "no CUDA device here" in failing(capsys, [*arguments, "--device", "cuda"])
    # Found out when tokens were read, and not in the way of a command that goes well.
    assert not (tmp_path / "out" / "config.json").exists()
    assert main([*arguments, "--codewords", "4"]) == 0


def test_the_artifact_is_pushed(
    hub: Any,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    assert main([*arguments, "--push-to-hub", "alice/river", "--private"]) == 0
    assert f"pushed to {hub.url}/alice/river" in capsys.readouterr().out
    assert hub.repositories["alice/river"].private
    there = CalibrationArtifact.from_pretrained("alice/river", method="a2ats")
    here = CalibrationArtifact.from_pretrained(tmp_path / "out")
    assert there.quality == here.quality
    for name, tensor in here.tensors.items():
        assert torch.equal(there.tensors[name], tensor)


def test_the_page_names_the_options_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    for command in (["calibrate", "a2ats"], ["calibrate", "aqua"], ["inspect"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        offered = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
        calls = re.findall(rf"hf-kvret {' '.join(command)}[^\n`]*", page)
        used = set(re.findall(r"--[\w-]+", " ".join(calls)))
        assert calls and used <= offered
        named = set(re.findall(r"`(--[\w-]+)", page)) | used
        assert not offered - named, "options that the page does not name"


def test_a_command_makes_the_predictors_of_the_model(
    aqua_arguments: list[str], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(aqua_arguments) == 0
    shown = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out'}" in shown and "value error unpredicted" in shown
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out", method="aqua")
    artifact.check(AutoConfig.from_pretrained(model_dir))
    # UUIDs are for those who ask.
    assert artifact.data["tokens"] == 400 and "uuid_tokens" not in artifact.data
    roles = [artifact.options["layers"][str(n)]["role"] for n in range(3)]
    assert roles == ["anchor", "predicted", "predicted"]
    assert artifact.tensors["layers.2.value.weight"].shape == (32, 64)
    assert not [name for name in artifact.tensors if name.startswith("layers.0.key")]


def test_every_option_reaches_the_calibration() -> None:
    usual = AquaCalibration().options()
    assert usual.keys() == ALL_OTHER.keys()
    assert all(ALL_OTHER[name] != usual[name] for name in ALL_OTHER)
    flags = [f"--{name.replace('_', '-')}" for name in ALL_OTHER]
    line = [
        word
        for flag, value in zip(flags, ALL_OTHER.values(), strict=True)
        for word in ([flag] if value is True else [flag, str(value)])
    ]
    assert aqua_options(*line).calibration().options() == ALL_OTHER
    assert aqua_options("--first-bits", "16").first_bits == 16


def test_mistakes_with_predictors_are_one_line_each(
    aqua_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, message in (
        (["--group", "64"], r"group=64 does not divide the 32 numbers of keys.* leave --group out"),
        (["--sinks", "100"], r"sinks=100 of sequences of at most 100 tokens: .* fewer --sinks"),
    ):
        assert re.search(message, failing(capsys, [*aqua_arguments, *more])), more
