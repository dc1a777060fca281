"""``hf-kvret calibrate aqua``: options, going on after Ctrl-C, models of several kinds."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.calibrate.aqua import AquaCalibration, AquaStudy
from hf_kvret.lab.calibrate.command_options import AquaOptions
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import Carried, LayerFindings, Progress
from hf_kvret.lab.program.options import add_options, read_options
from hf_kvret.testing import MODELS

from ...artifacts.artifact_folder import files_of, save_model, write_text

# Every option of AquaCalibration away from its default, but for the one that is of an mlp alone.
ALL_OTHER = {
    "bits": 3,
    "first_bits": "auto",
    "group": 8,
    "backbone": "minmax",
    "predictor": "low_rank",
    "rank": 16,
    "steps": 7,
    "predictor_bits": 4,
    "ridge": 0.5,
    "sinks": 2,
    "space": "after",
    "anchor_every": 2,
    "anchor_mean": True,
    "key_inputs": "none",
    "value_inputs": "keys",
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
    )
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", config)


@pytest.fixture
def arguments(model_dir: Path, tmp_path: Path) -> list[str]:
    """A whole command line that takes a second."""
    text = write_text(tmp_path / "river.txt")
    where = ["--model", str(model_dir), "--text", str(text), "--out", str(tmp_path / "out")]
    return ["calibrate", "aqua", *where, "--tokens", "400", "--length", "100"]


def parsed(*arguments: str) -> AquaOptions:
    parser = argparse.ArgumentParser()
    add_options(parser, AquaOptions)
    return read_options(AquaOptions, parser.parse_args(["--model", "m", "--out", "o", *arguments]))


def corpus(*lengths: int) -> Corpus:
    generator = torch.Generator().manual_seed(0)
    return Corpus([torch.randint(1, 128, (n,), generator=generator) for n in lengths], 1, {})


def test_a_command_makes_an_artifact_of_the_model(
    arguments: list[str], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
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
    assert main(["inspect", str(tmp_path / "out"), "--plot", str(tmp_path / "q.png")]) == 0


def test_the_defaults_are_the_papers() -> None:
    options = parsed()
    made = options.calibration()
    assert made == AquaCalibration()
    assert (made.bits, made.first_bits, made.backbone, made.predictor) == (2, 4, "higgs", "linear")
    assert (made.ridge, made.sinks, made.space, made.predictor_bits) == (1e-3, 4, "before", 16)
    assert (made.value_inputs, made.anchor_every, made.anchor_mean) == ("keys+values", None, False)


def test_every_option_reaches_the_calibration() -> None:
    usual = AquaCalibration().options()
    assert usual.keys() == ALL_OTHER.keys() | {"hidden"}
    assert all(ALL_OTHER[name] != usual[name] for name in ALL_OTHER)
    flags = [f"--{name.replace('_', '-')}" for name in ALL_OTHER]
    line = [
        word
        for flag, value in zip(flags, ALL_OTHER.values(), strict=True)
        for word in ([flag] if value is True else [flag, str(value)])
    ]
    options = parsed(*line)
    assert options.calibration().options() == ALL_OTHER | {"hidden": None}
    options = parsed("--predictor", "mlp", "--hidden", "10")
    assert options.calibration().hidden == 10
    assert parsed("--first-bits", "16").first_bits == 16


def test_the_same_command_goes_on_after_an_interruption(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, finished = AquaStudy.finish, []

    def counted(
        self: AquaStudy, progress: Progress, carried: Carried | None = None
    ) -> LayerFindings:
        if self.layer == 1 and not finished[1:]:
            finished.append(self.layer)
            raise KeyboardInterrupt
        finished.append(self.layer)
        return finish(self, progress, carried)

    monkeypatch.setattr(AquaStudy, "finish", counted)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert main(arguments) == 0
    assert finished == [0, 1, 1, 2]
    assert main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_mistakes_are_one_line_each(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for more, message in (
        (["--group", "64"], r"group=64 does not divide the 32 numbers of keys.* leave --group out"),
        (["--sinks", "100"], r"sinks=100 of sequences of at most 100 tokens: .* fewer --sinks"),
        (["--predictor", "low_rank"], r"rank=256: layer 0 has 32 numbers of keys a token.* --rank"),
        (["--hidden", "5"], r"--hidden 5 is of --predictor mlp, and it is linear"),
    ):
        capsys.readouterr()
        assert main([*arguments, *more]) == 2
        shown = capsys.readouterr().err
        lines = [line for line in shown.splitlines() if "hf-kvret: error" in line]
        assert len(lines) == 1 and re.search(message, lines[0]), more
        # No text was read for it.
        assert "reading for layers" not in shown
        assert not (Path(arguments[arguments.index("--out") + 1]) / ".parts").exists()


def test_bits_that_are_no_number_are_told_which_are(capsys: pytest.CaptureFixture[str]) -> None:
    for bits in ("²", "x", ""):
        with pytest.raises(SystemExit):
            parsed("--first-bits", bits)
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.endswith(f"--first-bits: {bits!r} is none of 2, 3, 4, 16 bits, and not auto")
    with pytest.raises(SystemExit):
        parsed("--first-bits", "5")
    assert "--first-bits: invalid choice: 5" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "smollm3", "gpt_oss"])
def test_models_of_several_kinds_are_calibrated(name: str, tmp_path: Path) -> None:
    model = MODELS[name].build()
    artifact = calibrate(
        model, corpus(80, 60, 40), AquaCalibration(), tmp_path, name="me/it", progress=False
    )
    layers = list(MODELS[name].full_attention)
    assert [row["layer"] for row in artifact.quality] == layers
    told = artifact.options["layers"]
    assert [told[str(n)]["previous"] for n in layers] == [None, *layers[:-1]]
    heads, width = told[str(layers[0])]["heads"], told[str(layers[0])]["head_dim"]
    weight = artifact.tensors[f"layers.{layers[1]}.key.weight"]
    assert weight.shape == (heads * width, heads * width)
    group = told[str(layers[0])]["group"]
    assert (heads * width) % group == 0 and (heads * width) % (2 * group)
