"""The runner: what reaches a method's studies, when tokens are let go, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.study import (
    Calibration,
    Carried,
    Corpus,
    LayerFindings,
    LayerStudy,
    Progress,
    calibrate,
)
from hf_kvret.lab.calibrate.taps import LayerTokens
from hf_kvret.testing import MODELS
from hf_kvret.testing.models import REFUSED
from hf_kvret_model_patches.rope import Rope

SMALL = A2ATSCalibration(codewords=8, distance=32, rounds=3)


class Recorder(Calibration):
    """A method that learns which tokens it was shown."""

    method = "recorder"

    def __init__(self) -> None:
        self.studies: list[Record] = []

    def study(self, layer: int, rope: Rope, device: torch.device) -> Record:
        self.studies.append(Record(layer, rope, device))
        return self.studies[-1]

    def options(self) -> dict[str, Any]:
        return {"kind": "recorder"}


@dataclass
class Record(LayerStudy):
    layer: int
    rope: Rope
    device: torch.device
    seen: list[tuple[LayerTokens, bool]] = field(default_factory=list)

    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        self.seen.append((tokens, held_out))

    @property
    def work(self) -> int:
        return 1

    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        progress(1)
        keys = torch.cat([tokens.key[0] for tokens, _ in self.seen], dim=1)
        return LayerFindings({"keys": keys.contiguous()}, {"seen": len(self.seen)}, {"nothing": 0})


def corpus(*lengths: int, held_out: int = 0) -> Corpus:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 128, (n,), generator=generator) for n in lengths]
    return Corpus(ids, held_out, {"text": "random"})


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_every_full_attention_layer_is_shown_every_token_once(name: str, tmp_path: Path) -> None:
    model, texts, recorder = MODELS[name].build(), corpus(20, 9, 14, held_out=1), Recorder()
    calibrate(model, texts, recorder, tmp_path, progress=False)
    assert [study.layer for study in recorder.studies] == list(MODELS[name].full_attention)
    for study in recorder.studies:
        assert [tokens.key.shape[2] for tokens, _ in study.seen] == [20, 9, 14]
        assert [held_out for _, held_out in study.seen] == [False, False, True]
        for tokens, _ in study.seen:
            assert len(tokens.key) == 1 and not tokens.key.requires_grad


@pytest.mark.parametrize(("held", "readings"), [(1 << 30, 1), (2 * 50 * 2 * 2 * 16 * 4, 2), (1, 3)])
def test_as_many_layers_are_read_at_once_as_fit(
    held: int, readings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of two heads of 16 numbers in fp32, for 50 tokens."""
    monkeypatch.setattr("hf_kvret.lab.calibrate.study._MOST_HELD", held)
    model, lengths = MODELS["smollm3"].build(), list[int]()

    def count(module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        assert kwargs["use_cache"] is False
        lengths.append((args[0] if args else kwargs["input_ids"]).shape[1])

    model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    calibrate(model, corpus(20, 30), Recorder(), tmp_path, progress=False)
    assert [length for length in lengths if length >= 20] == [20, 30] * readings


def test_layers_may_be_on_several_devices(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, texts = MODELS["smollm3"].build(), corpus(40, 20, held_out=1)
    plain = calibrate(model, texts, SMALL, tmp_path / "plain", progress=False)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{n}": "cpu" for n in range(3)} | {"lm_head": "cpu"}
    # Offloaded weights come when their layer runs and are on no device before and after.
    places |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    spread = accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(tmp_path / "weights"), force_hooks=True
    )
    assert next(spread.model.layers[1].parameters()).device.type == "meta"
    artifact = calibrate(spread, texts, SMALL, tmp_path / "spread", progress=False)
    assert artifact.tensors.keys() == plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        assert torch.equal(tensor, artifact.tensors[name]), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("falcon", "computes attention by itself"),
        ("t5", "encoder-decoder"),
        ("mamba", "no full-attention layer"),
        ("llama", r"2049 tokens, but the model knows 2048 positions"),
    ],
)
def test_models_and_texts_that_do_not_go_are_refused_before_any_reading(
    name: str, message: str, tmp_path: Path
) -> None:
    model = MODELS[name].build() if name in MODELS else REFUSED[name]()
    recorder = Recorder()
    with pytest.raises(ValueError, match=message):
        calibrate(model, corpus(20, 2049), recorder, tmp_path / "out", progress=False)
    assert not recorder.studies and not (tmp_path / "out").exists()
