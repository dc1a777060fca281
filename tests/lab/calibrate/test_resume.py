"""Calibration after an interruption: it goes on to the same artifact, and mixes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import (
    Calibration,
    Carried,
    LayerFindings,
    LayerStudy,
    Progress,
)
from hf_kvret.lab.calibrate.taps import LayerTokens
from hf_kvret.testing import MODELS
from hf_kvret_model_patches.rope import Rope

from ...artifacts.artifact_folder import files_of

TEXTS = [torch.arange(1, 31), torch.arange(40, 60)]
CORPUS = Corpus(TEXTS, 0, {})
carries = pytest.mark.parametrize("carries", [True, False], ids=["carries", "alone"])


class Chain(Calibration):
    """Layers whose keys are averaged, until one is pressed.

    Where it ``carries``, the keys of the layers below are added.
    """

    method = "chain"

    def __init__(self, stop: int = 99, carries: bool = True, seed: int = 0) -> None:
        self.stop, self.carries, self.seed = stop, carries, seed
        self.finished: list[tuple[int, Carried | None]] = []
        self.files: list[list[str]] = []
        self.out: Path | None = None

    def study(self, layer: int, rope: Rope, device: torch.device) -> Link:
        return Link(self, layer)

    def options(self) -> dict[str, Any]:
        return {"seed": self.seed, "carries": self.carries}


class Link(LayerStudy):
    work = 1

    def __init__(self, chain: Chain, layer: int) -> None:
        self.chain, self.layer = chain, layer
        self.keys: list[torch.Tensor] = []

    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        self.keys.append(tokens.key[0, 0].clone())

    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        if self.layer >= self.chain.stop:
            raise KeyboardInterrupt
        self.chain.finished.append((self.layer, carried))
        if self.chain.out is not None:
            self.chain.files.append(kept(self.chain.out))
        total = torch.cat(self.keys)
        if not self.chain.carries:
            return LayerFindings({"mean": total.mean(0)})
        if carried is not None:
            total = total + carried["total"].float()
        last = torch.tensor(self.layer)
        return LayerFindings(
            {"mean": total.mean(0)}, carried={"total": total.bfloat16(), "last": last}
        )


def kept(out: Path) -> list[str]:
    return sorted(file.name for file in (out / ".parts").glob("*.safetensors"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model of three layers."""
    return MODELS["smollm3"].build()


def interrupt(
    model: PreTrainedModel, out: Path, at: int, layers_at_once: int = 4, carries: bool = True
) -> None:
    chain = Chain(at, carries)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, CORPUS, chain, out, layers_at_once=layers_at_once, progress=False)
    assert not (out / "config.json").exists()


def go_on(
    model: PreTrainedModel,
    out: Path,
    corpus: Corpus = CORPUS,
    carries: bool = True,
    whole: Path | None = None,
    **options: Any,
) -> list[int]:
    """Which layers were finished; the artifact must be that of a run in the folder ``whole``."""
    chain = Chain(carries=carries, **options)
    calibrate(model, corpus, chain, out, progress=False)
    assert not (out / ".parts").exists()
    if whole is not None:
        calibrate(model, corpus, Chain(carries=carries, **options), whole, progress=False)
        assert files_of(out) == files_of(whole)
    return [layer for layer, _ in chain.finished]


@pytest.mark.parametrize("at_once", [1, 4])
def test_each_layer_gets_what_the_one_before_left(
    model: PreTrainedModel, tmp_path: Path, at_once: int
) -> None:
    chain = Chain()
    calibrate(model, CORPUS, chain, tmp_path, layers_at_once=at_once, progress=False)
    assert [layer for layer, _ in chain.finished] == [0, 1, 2]
    (_, first), (_, second), (_, third) = chain.finished
    assert first is None
    assert [int(one["last"]) for one in (second, third) if one is not None] == [0, 1]


def test_only_the_newest_layers_carried_tensors_are_on_disk(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    chain = Chain()
    chain.out = tmp_path
    calibrate(model, CORPUS, chain, tmp_path, progress=False)
    assert chain.files == [
        [],
        ["carried_0.safetensors", "layer_0.safetensors"],
        ["carried_1.safetensors", "layer_0.safetensors", "layer_1.safetensors"],
    ]
    assert len(files_of(tmp_path)) == 2 and len(list(tmp_path.iterdir())) == 3


def test_layers_are_kept_until_the_artifact_is_saved(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CalibrationArtifact, "save_pretrained", press)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, CORPUS, Chain(), tmp_path, progress=False)
    layers = [f"layer_{layer}.safetensors" for layer in range(3)]
    assert kept(tmp_path) == ["carried_2.safetensors", *layers]
    monkeypatch.undo()
    assert go_on(model, tmp_path) == []


@carries
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("at", [1, 2])
def test_the_same_call_goes_on_to_the_same_artifact(
    model: PreTrainedModel, tmp_path: Path, at: int, at_once: int, carries: bool
) -> None:
    out = tmp_path / "out"
    interrupt(model, out, at, at_once, carries)
    assert (f"carried_{at - 1}.safetensors" in kept(out)) == carries
    left = go_on(model, out, carries=carries, whole=tmp_path / "whole")
    assert left == list(range(at, 3))


def test_an_interruption_between_the_two_files_of_a_layer_repeats_that_layer(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupt(model, out, 1)
    carried = (out / ".parts" / "carried_0.safetensors").read_bytes()
    interrupt(model, out, 2)
    # Layer 1's carried tensors are there, the layer isn't, and layer 0's are not deleted yet.
    (out / ".parts" / "layer_1.safetensors").unlink()
    (out / ".parts" / "carried_0.safetensors").write_bytes(carried)
    assert go_on(model, out, whole=tmp_path / "whole") == [1, 2]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"carries": False},
        {"corpus": Corpus([TEXTS[0], TEXTS[1] + 1], 0, {})},
        {"corpus": Corpus(TEXTS, 1, {})},
    ],
    ids=["options", "more options", "tokens", "held out"],
)
def test_parts_of_another_calibration_are_refused_and_not_lost(
    model: PreTrainedModel, tmp_path: Path, other: dict[str, Any]
) -> None:
    interrupt(model, tmp_path, 2)
    with pytest.raises(ValueError, match=r"holds finished layers of another calibration .*delete"):
        go_on(model, tmp_path, **other)
    assert go_on(model, tmp_path) == [2]


def test_parts_of_another_model_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    interrupt(model, tmp_path, 2)
    other = MODELS["smollm3"].build()
    with torch.no_grad():
        other.model.layers[2].self_attn.k_proj.weight.mul_(1.1)
    with pytest.raises(ValueError, match="another calibration"):
        go_on(other, tmp_path)
    other.load_state_dict(model.state_dict())
    assert go_on(other, tmp_path) == [2]


def test_parts_of_the_model_in_another_dtype_are_refused(tmp_path: Path) -> None:
    # A checkpoint whose elements are the same in both.
    folder = tmp_path / "model"
    MODELS["smollm3"].build().to(torch.bfloat16).save_pretrained(folder)
    whole, half = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    interrupt(whole, tmp_path / "out", 2)
    with pytest.raises(ValueError, match="another calibration"):
        go_on(half, tmp_path / "out")
