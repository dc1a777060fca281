"""Layers that build on each other: what one carries to the next, also over an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import (
    Calibration,
    Carried,
    LayerFindings,
    LayerStudy,
    Progress,
)
from hf_kvret.testing import MODELS
from hf_kvret_model_patches.rope import Rope
from hf_kvret_model_patches.taps import LayerTokens

from ...artifacts.artifact_folder import files_of

CORPUS = Corpus([torch.arange(1, 31), torch.arange(40, 60)], 0, {})


class Chain(Calibration):
    """Layers that add their keys to what the layer below carried, until a layer is pressed."""

    method = "chain"

    def __init__(self, stop: int = 99) -> None:
        self.stop = stop
        self.finished: list[tuple[int, Carried | None]] = []
        self.files: list[list[str]] = []
        self.out: Path | None = None

    def study(self, layer: int, rope: Rope, device: torch.device) -> Link:
        return Link(self, layer)

    def options(self) -> dict[str, Any]:
        return {}


class Link(LayerStudy):
    work = 1

    def __init__(self, chain: Chain, layer: int) -> None:
        self.chain, self.layer = chain, layer
        self.keys: list[torch.Tensor] = []

    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        self.keys.append(tokens.key_before[0, 0].clone())

    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        if self.layer >= self.chain.stop:
            raise KeyboardInterrupt
        self.chain.finished.append((self.layer, carried))
        if self.chain.out is not None:
            self.chain.files.append(kept(self.chain.out))
        total = torch.cat(self.keys)
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


def whole(model: PreTrainedModel, out: Path) -> dict[str, bytes]:
    """The files of a run that nothing interrupts."""
    calibrate(model, CORPUS, Chain(), out, progress=False)
    return files_of(out)


def interrupt(model: PreTrainedModel, out: Path, at: int, layers_at_once: int = 4) -> None:
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, CORPUS, Chain(at), out, layers_at_once=layers_at_once, progress=False)


def go_on(model: PreTrainedModel, out: Path) -> list[int]:
    """Which layers were finished; the artifact must be that of a whole run."""
    chain = Chain()
    calibrate(model, CORPUS, chain, out, progress=False)
    assert not (out / ".parts").exists()
    return [layer for layer, _ in chain.finished]


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_each_layer_gets_what_the_one_before_left(
    model: PreTrainedModel, tmp_path: Path, at_once: int
) -> None:
    chain = Chain()
    calibrate(model, CORPUS, chain, tmp_path, layers_at_once=at_once, progress=False)
    assert [layer for layer, _ in chain.finished] == [0, 1, 2]
    (_, first), (_, second), (_, third) = chain.finished
    assert first is None
    assert [int(one["last"]) for one in (second, third) if one is not None] == [0, 1]


def test_layers_that_slide_are_stepped_over(tmp_path: Path) -> None:
    chain = Chain()
    calibrate(MODELS["gemma3"].build(), CORPUS, chain, tmp_path, progress=False)
    assert [layer for layer, _ in chain.finished] == [1, 2]
    assert chain.finished[0][1] is None and int(chain.finished[1][1]["last"]) == 1


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


def test_the_last_layer_carries_to_nobody_and_writes_nothing_of_it(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_kvret.artifacts.artifact.write_folder", press)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, CORPUS, Chain(), tmp_path, progress=False)
    assert kept(tmp_path) == [f"layer_{layer}.safetensors" for layer in range(3)]
    monkeypatch.undo()
    assert go_on(model, tmp_path) == []


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("at", [1, 2])
def test_what_was_carried_outlives_an_interruption(
    model: PreTrainedModel, tmp_path: Path, at: int, at_once: int
) -> None:
    expected, out = whole(model, tmp_path / "whole"), tmp_path / "out"
    interrupt(model, out, at, at_once)
    assert f"carried_{at - 1}.safetensors" in kept(out)
    assert go_on(model, out) == list(range(at, 3))
    assert files_of(out) == expected


def test_an_interruption_between_the_two_files_of_a_layer_repeats_that_layer(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    expected, out = whole(model, tmp_path / "whole"), tmp_path / "out"
    interrupt(model, out, 1)
    carried = (out / ".parts" / "carried_0.safetensors").read_bytes()
    interrupt(model, out, 2)
    # Layer 1's carried tensors are there, the layer isn't, and layer 0's are not deleted yet.
    (out / ".parts" / "layer_1.safetensors").unlink()
    (out / ".parts" / "carried_0.safetensors").write_bytes(carried)
    assert go_on(model, out) == [1, 2]
    assert files_of(out) == expected


@pytest.mark.parametrize("how", ["cut", "one bit"])
@pytest.mark.parametrize("damage", ["carried_1", "layer_0", "layer_1"])
def test_a_broken_chain_starts_anew(
    model: PreTrainedModel, tmp_path: Path, damage: str, how: str
) -> None:
    expected, out = whole(model, tmp_path / "whole"), tmp_path / "out"
    interrupt(model, out, 2)
    file = out / ".parts" / f"{damage}.safetensors"
    content = file.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    file.write_bytes(content[:-2] if how == "cut" else flipped)
    assert go_on(model, out) == [0, 1, 2]
    assert files_of(out) == expected
