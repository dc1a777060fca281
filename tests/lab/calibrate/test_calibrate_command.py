"""``hf-kvret calibrate``: options, what is held out, one line for each mistake."""

from __future__ import annotations

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
from hf_kvret.lab.program.program import Parser

from ...artifacts.artifact_folder import save_model, write_text

PAGE = Path(__file__).parents[3] / "docs" / "calibration.md"
SMALL = ("--codewords", "8", "--distance", "64", "--rounds", "3")
SHORT = ("--tokens", "400", "--length", "100", "--uuid-tokens", "100")


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
def sources(model_dir: Path, text: Path, tmp_path: Path) -> list[str]:
    """What is learned from, and where the artifact goes."""
    return ["--model", str(model_dir), "--text", str(text), "--out", str(tmp_path / "out")]


def parsed(cls: type[Any], *arguments: str) -> Any:
    parser = Parser()
    add_options(parser, cls)
    return read_options(cls, parser.parse_args(["--model", "m", "--out", "o", *arguments]))


def test_a_command_makes_the_codebooks_of_the_model(
    sources: list[str], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "a2ats", *sources, *SMALL, *SHORT]) == 0
    shown = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out'}" in shown and "score error" in shown
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out", method="a2ats")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    artifact.check(model.config)
    assert artifact.check_weights(model) > 5
    assert artifact.model.name == "tiny-llama" and artifact.data["held_out_sequences"] == 1
    assert artifact.data["tokens"] == 400 and artifact.data["uuid_tokens"] == 100
    assert artifact.data["text"].startswith("river.txt ")
    assert artifact.tensors["layers.2.codewords"].shape == (2, 8, 16)
    # No path of this machine is shared with the artifact.
    for name in ("config.json", "README.md"):
        assert str(tmp_path.parent) not in (tmp_path / "out" / name).read_text()


def test_a_command_makes_the_predictors_of_the_model(
    sources: list[str], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "aqua", *sources, *SHORT[:4]]) == 0
    assert "value error unpredicted" in capsys.readouterr().out
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out", method="aqua")
    artifact.check(AutoConfig.from_pretrained(model_dir))
    # UUIDs are for those who ask.
    assert artifact.data["tokens"] == 400 and "uuid_tokens" not in artifact.data
    roles = [artifact.options["layers"][str(n)]["role"] for n in range(3)]
    assert roles == ["anchor", "predicted", "predicted"]
    assert artifact.tensors["layers.2.value.weight"].shape == (32, 64)
    assert not [name for name in artifact.tensors if name.startswith("layers.0.key")]


def test_options_reach_the_artifact(sources: list[str], tmp_path: Path) -> None:
    more = ["--space", "rotated", "--seed", "3", "--name", "me/it", "--held-out", "0"]
    command = ["calibrate", "a2ats", *sources, *SMALL, *SHORT, *more, "--dtype", "bfloat16"]
    assert main(command) == 0
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out")
    expected = {"space": "rotated", "seed": 3, "codewords": 8, "window": 64}
    assert {name: artifact.options[name] for name in expected} == expected
    assert artifact.model.name == "me/it"
    assert all(row["score_error"] is None for row in artifact.quality)


def test_every_option_of_aqua_reaches_its_calibration() -> None:
    other = {"bits": 3, "first_bits": "auto", "group": 8, "ridge": 0.5, "sinks": 2, "seed": 9}
    other |= {"space": "after", "anchor_mean": True}
    usual = AquaCalibration().options()
    assert usual.keys() == other.keys() and all(other[name] != usual[name] for name in other)
    line = ["--anchor-mean"]
    for name, value in other.items():
        if value is not True:
            line += [f"--{name.replace('_', '-')}", str(value)]
    assert parsed(AquaOptions, *line).calibration().options() == other
    assert parsed(AquaOptions, "--first-bits", "16").first_bits == 16


def test_the_bundled_model_learns_from_its_own_language(tmp_path: Path, program: Any) -> None:
    where = ["calibrate", "a2ats", "--model", "needle", "--out", tmp_path / "out"]
    program(*where, *SMALL, "--tokens", 512, "--length", 128)
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out")
    assert artifact.data["documents"] == "needle language" and artifact.data["tokens"] == 512
    assert all(0 < row["score_error"] < 1 for row in artifact.quality)
    error = program(*where, "--uuid-tokens", "2K", status=2).err
    assert "leave --text, --dataset and --uuid-tokens out" in error


def test_the_held_out_text_is_the_end_of_the_text(model_dir: Path, text: Path) -> None:
    subject = load_subject(str(model_dir))

    def corpus(*more: str) -> Any:
        options = parsed(A2ATSOptions, "--text", str(text), *SHORT, *more)
        return make_corpus(options, subject)

    made = corpus()
    assert [len(ids) for ids in made.sequences] == [100] * 5
    words = subject.need_tokenizer("test").decode
    assert "The river" not in words(made.sequences[0])
    read = " ".join(words(ids) for ids in made.sequences[1:])
    assert read.index("1. The") < read.index("9. The")
    # A share of the text, at least one sequence and never all.
    shares = {"0": 0, "0.1": 1, "0.5": 2, "0.99": 3}
    assert {share: corpus("--held-out", share).held_out for share in shares} == shares
    few = r"--held-out 0\.1 of one sequence with 100 tokens: .* shorter --length or --held-out 0"
    with pytest.raises(ValueError, match=few):
        corpus("--tokens", "100")
    assert corpus("--tokens", "100", "--held-out", "0").held_out == 0
    assert len(corpus("--uuid-tokens", "0").sequences) == 4


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("a2ats", ["--out", "FILE"], r"--out: no file can be written to .*file \("),
        ("a2ats", ["--tokens", "1M"], r"--tokens 1048576: the text has \d+ tokens; give more text"),
        ("a2ats", ["--codewords", "40000"], "codewords=40000 must be at least 1 and at most 32768"),
        (
            "a2ats",
            ["--length", "2K", "--uuid-tokens", "2K", "--held-out", "0"],
            "2048 tokens, but the model has 1024 pos",
        ),
        ("a2ats", ["--model", "FILE"], "can't be loaded"),
        ("aqua", ["--group", "64"], "group=64 does not divide the 32 numbers of keys"),
        ("aqua", ["--sinks", "100"], "sinks=100 of sequences of at most 100 tokens: .* --sinks"),
    ],
)
def test_mistakes_are_one_line_each(
    method: str, more: list[str], message: str, sources: list[str], tmp_path: Path, program: Any
) -> None:
    (tmp_path / "file").write_text("x")
    more = [word.replace("FILE", str(tmp_path / "file")) for word in more]
    own = SMALL if method == "a2ats" else ()
    error = program("calibrate", method, *sources, *own, *SHORT, *more, status=2).err
    assert re.search(message, error.splitlines()[-1])
    # Found out when tokens were read, and not in the way of a command that goes well.
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_named(sources: list[str], program: Any) -> None:
    words = ["calibrate", "a2ats", *sources, *SMALL, *SHORT, "--device", "cuda"]
    assert "no CUDA device here" in program(*words, status=2).err


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
