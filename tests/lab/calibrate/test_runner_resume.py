"""Calibration after an interruption: it goes on, to the same artifact, and mixes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration, CodebookStudy
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import LayerFindings, Progress
from hf_kvret.testing import MODELS
from hf_kvret_model_patches.rope import Rope

from ...artifacts.artifact_folder import files_of


class Interrupted(A2ATSCalibration):
    """Layers whose number is at least `stop` can't be finished: somebody presses Ctrl-C."""

    stop = 99

    def study(self, layer: int, rope: Rope, device: torch.device) -> CodebookStudy:
        made = super().study(layer, rope, device)
        studied.append(layer)
        if layer >= self.stop:
            made.finish = _press  # type: ignore[method-assign]
        return made


class AtOne(Interrupted):
    stop = 1


class AtTwo(Interrupted):
    stop = 2


studied: list[int] = []
OPTIONS: dict[str, Any] = {"codewords": 8, "window": 32, "rounds": 3}
TEXT = {"text": "a.txt"}


def _press(progress: Progress, carried: object) -> LayerFindings:
    progress(1)
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _nothing_studied() -> None:
    studied.clear()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model of three layers."""
    return MODELS["smollm3"].build()


def corpus(seed: int = 0, held_out: int = 1) -> Corpus:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 128, (n,), generator=generator) for n in (50, 30, 20)]
    return Corpus(ids, held_out, TEXT)


def interrupt(
    model: PreTrainedModel, out: Path, at: type[Interrupted] = AtTwo, at_once: int = 4
) -> None:
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, corpus(), at(**OPTIONS), out, layers_at_once=at_once, progress=False)
    studied.clear()


def go_on(model: PreTrainedModel, out: Path, texts: Corpus | None = None, **options: Any) -> None:
    made = Interrupted(**{**OPTIONS, **options})
    calibrate(model, texts or corpus(), made, out, progress=False)


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize(("at", "left"), [(AtOne, [1, 2]), (AtTwo, [2])], ids=["one", "two"])
def test_the_same_call_goes_on_to_the_same_artifact(
    model: PreTrainedModel, tmp_path: Path, at: type[Interrupted], left: list[int], at_once: int
) -> None:
    go_on(model, tmp_path / "whole")
    assert studied == [0, 1, 2]
    out = tmp_path / "interrupted"
    interrupt(model, out, at, at_once)
    assert not (out / "config.json").exists()
    go_on(model, out)
    assert studied == left
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not (out / ".parts").exists()


def test_several_interruptions_are_survived(model: PreTrainedModel, tmp_path: Path) -> None:
    go_on(model, tmp_path / "whole")
    out = tmp_path / "interrupted"
    interrupt(model, out, AtOne)
    interrupt(model, out, AtOne)
    interrupt(model, out, AtTwo)
    go_on(model, out)
    assert studied == [2]
    assert files_of(out) == files_of(tmp_path / "whole")


def test_an_interruption_while_it_is_saved_costs_nothing(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_kvret.artifacts.artifact.write_folder", press)
        with pytest.raises(KeyboardInterrupt):
            go_on(model, tmp_path)
    studied.clear()
    go_on(model, tmp_path)
    assert not studied and (tmp_path / "config.json").exists()


def test_a_layer_that_is_half_written_is_learned_again(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    go_on(model, tmp_path / "whole")
    out = tmp_path / "interrupted"
    interrupt(model, out)
    file = out / ".parts" / "layer_1.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (out / ".parts" / "2.unfinished").write_bytes(b"half")
    go_on(model, out)
    assert studied == [1, 2]
    assert files_of(out) == files_of(tmp_path / "whole")


def test_other_files_of_the_folder_stay(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    interrupt(model, tmp_path)
    go_on(model, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "change", [{"codewords": 9}, {"seed": 1}, {"space": "rotated"}, {"compare": False}], ids=str
)
def test_parts_with_other_options_are_refused(
    model: PreTrainedModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    interrupt(model, tmp_path)
    with pytest.raises(ValueError, match=r"holds finished layers of another calibration .*delete"):
        go_on(model, tmp_path, **change)
    # What is there is not lost.
    go_on(model, tmp_path)
    assert studied == [2]


def test_parts_of_other_tokens_are_refused_whatever_their_name(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    interrupt(model, tmp_path)
    for other in (corpus(seed=1), corpus(held_out=2)):
        with pytest.raises(ValueError, match="another calibration"):
            go_on(model, tmp_path, other)
    assert not studied


def test_parts_of_another_model_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    interrupt(model, tmp_path / "out")
    other = MODELS["smollm3"].build()
    with torch.no_grad():
        other.model.layers[2].self_attn.k_proj.weight.mul_(1.1)
    with pytest.raises(ValueError, match="another calibration"):
        go_on(other, tmp_path / "out")
    other.load_state_dict(model.state_dict())
    go_on(other, tmp_path / "out")
    assert studied == [2]


def test_parts_of_the_model_in_another_dtype_are_refused(tmp_path: Path) -> None:
    # A checkpoint whose numbers are the same in both.
    folder = tmp_path / "model"
    MODELS["smollm3"].build().to(torch.bfloat16).save_pretrained(folder)
    whole, half = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    interrupt(whole, tmp_path / "out")
    with pytest.raises(ValueError, match="another calibration"):
        go_on(half, tmp_path / "out")
