"""AQUA-KV taken apart by one command: its artifacts, and numbers that are those of the caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aqua_variants
import calibrated
import pytest
import torch
from aqua_ablation import MEASUREMENT
from aqua_variants import ABLATIONS, EXPLAINED, ablation_rows, ablation_variants, bit_variants
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.evaluation.subject import Subject, load_subject
from hf_kvret.evaluation.texts import read_text, token_ids
from hf_kvret.methods.aqua import AquaKVCache
from hf_kvret_kernels.higgs import HiggsCodec

REGIONS: dict[str, Any] = {"recent": 16, "flush": 16}
AQUA = ":".join(["aqua", *(f"{name}={value}" for name, value in REGIONS.items())])
LENGTH, STEP, LEARNED = 150, 16, 450
# Two layers, two KV heads of 64: a token's keys are 128 numbers, which share a scale.
LAYERS, WIDTH = 2, 128

Found = dict[tuple[str, str], dict[str, Any]]


# Each needs an artifact of its own, so a few stand for all.
FEW = {
    "predictors": ("linear", "reduced rank", "linear, 4 bits (GPTQ)"),
    "first layer": ("4 bits", "16 bits"),
    "sinks": ("4", "64"),
    "keys": ("before RoPE", "after RoPE"),
    "anchors": ("first layer", "every 2 layers"),
    "inputs": ("values from keys and values", "no predictors (HIGGS)"),
    "calibrated": ("with 2 bits", "without a codec"),
}


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """Fewer variants than the study has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aqua_variants, "BITS", (2,))
        for group in [*ABLATIONS]:
            names = FEW.get(group, ())
            patch.setitem(ABLATIONS, group, {name: ABLATIONS[group][name] for name in names})
            if not names:
                patch.delitem(ABLATIONS, group)
        for name in ("3 bits", "4 bits", "from keys", "from values"):
            patch.delitem(EXPLAINED, name)
        yield


def _run(measured: Any, path: Path, *arguments: str) -> Found:
    return {key[:2]: one for key, one in measured(MEASUREMENT, path, *arguments).items()}


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--caches", AQUA]
    arguments += ["--context", str(LENGTH), "--windows", "1", "--step", str(STEP)]
    arguments += ["--calibration-tokens", str(LEARNED), "--calibration-length", "150"]
    return [*arguments, "--mlp-steps", "2", "--hidden", "16"]


@pytest.fixture(scope="module")
def subject(tiny_model_dir: Path) -> Subject:
    return load_subject(str(tiny_model_dir))


@pytest.fixture(scope="module")
def whole(
    few: None,
    measured: Any,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_text: Path,
) -> tuple[Path, Found]:
    """A folder with artifacts and the table of the parts that read, and their numbers."""
    folder = tmp_path_factory.mktemp("ablation")
    outputs = ["--table", str(folder / "a.md")]
    outputs += ["--parts", "bits,parts,variance,layers"]
    arguments = [*_arguments(tiny_model_dir, tiny_text), *outputs]
    return folder, _run(measured, folder / "a.json", *arguments)


def _window(subject: Subject, text: Path) -> torch.Tensor:
    """The first window after the calibration's tokens."""
    ids = token_ids(subject.need_tokenizer("test"), read_text(text))
    return torch.cat([ids[:1], ids[LEARNED : LEARNED + LENGTH - 1]])


def _perplexity(subject: Subject, window: torch.Tensor, cache: Any, step: int) -> float:
    logits = []
    with torch.inference_mode():
        for tokens in window.split(step):
            logits.append(subject.model(tokens[None], past_key_values=cache).logits[0])
    foretold = torch.cat(logits)[:-1].double()
    return math.exp(torch.nn.functional.cross_entropy(foretold, window[1:]).item())


def test_one_command_measures_the_parts_that_read(whole: tuple[Path, Found]) -> None:
    folder, found = whole
    assert set(found) == {
        *(("bits", name) for name in bit_variants()),
        *(("parts", name) for name in ablation_variants()),
        *(("variance", name) for name in EXPLAINED),
        ("layers", "higgs, 2 bits"),
    }
    table = (folder / "a.md").read_text()
    assert "| aqua, 2 bits" not in table and "keys explained, layer" in table
    # The usual variant stands in each group of table 1.
    assert table.count("(usual)") == len({group for group, *_ in ablation_rows()})


def test_full_attention_has_the_perplexity_of_one_forward_pass(
    whole: tuple[Path, Found], subject: Subject, tiny_text: Path
) -> None:
    window = _window(subject, tiny_text)
    expected = _perplexity(subject, window, DynamicCache(), LENGTH)
    for part in ("bits", "parts"):
        assert whole[1][part, "full"]["ppl"] == pytest.approx(expected, rel=1e-5)
        assert whole[1][part, "full"]["tokens"] == LENGTH - 1


@pytest.mark.parametrize(
    ("part", "name", "folder", "options"),
    [
        ("bits", "aqua, 2 bits", "usual", {"bits": 2}),
        ("bits", "higgs, 2 bits", None, {"bits": 2}),
        ("bits", "kivi, 2 bits", None, {"bits": 2, "backbone": "kivi"}),
        ("bits", "round-to-nearest, 2 bits", None, {"bits": 2, "backbone": "minmax"}),
        ("parts", "aqua", "usual", {"bits": 2}),
        ("parts", "predictors: linear, 4 bits (GPTQ)", "predictor_bits-4", {}),
        ("parts", "first layer: 16 bits", "first_bits-16", {"first_bits": 16}),
        ("parts", "sinks: 64", "sinks-64", {"sink": 64}),
        ("parts", "keys: after RoPE", "space-after", {}),
        (
            "parts",
            "calibrated: without a codec",
            "bits-16_first_bits-16",
            {"bits": 2, "first_bits": 4},
        ),
    ],
)
def test_each_row_is_that_of_its_cache(
    whole: tuple[Path, Found],
    subject: Subject,
    tiny_text: Path,
    part: str,
    name: str,
    folder: str | None,
    options: dict[str, Any],
) -> None:
    learned = {"predictor": "none"} if folder is None else {}
    if folder is not None:
        learned["artifact"] = str(whole[0] / "a-artifacts" / folder)
    cache = AquaKVCache(config=subject.model.config, dense_below=0, **REGIONS, **options, **learned)
    expected = _perplexity(subject, _window(subject, tiny_text), cache, STEP)
    assert whole[1][part, name]["ppl"] == pytest.approx(expected, rel=1e-6)


def test_a_layer_that_is_coded_alone_leaves_the_others_exact(
    whole: tuple[Path, Found], subject: Subject, tiny_text: Path
) -> None:
    """Against a cache of full attention in whose layer rows are coded when they turn cold."""

    class Coded(DynamicLayer):
        coded = 0

        def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            held = super().update(keys, values, *args, **kwargs)
            # Regions of 16 + 16 and steps of 16: every second step all but 16 turn cold.
            past = held[0].shape[2] - keys.shape[2]
            cold = max(0, past - 16) if past - self.coded >= 32 else self.coded
            for x in (self.keys, self.values):
                rows = x[:, :, self.coded : cold].transpose(1, 2).flatten(2)
                near = codec.decode(*codec.encode(rows), torch.float32).unflatten(2, (2, -1))
                x[:, :, max(4, self.coded) : cold] = near.transpose(1, 2)[
                    :, :, max(4, self.coded) - self.coded :
                ]
            self.coded = cold
            return self.keys, self.values

    codec = HiggsCodec(2, WIDTH)
    window = _window(subject, tiny_text)
    found = whole[1]["layers", "higgs, 2 bits"]
    assert found["full"]["ppl"] == whole[1]["bits", "full"]["ppl"]
    for number in range(LAYERS):
        cache = DynamicCache()
        cache.layers = [Coded() if n == number else DynamicLayer() for n in range(LAYERS)]
        expected = _perplexity(subject, window, cache, STEP)
        assert found["layers"][number]["layer"] == number
        assert found["layers"][number]["ppl"] == pytest.approx(expected, rel=1e-5)
        assert found["layers"][number]["ppl"] != pytest.approx(found["full"]["ppl"], rel=1e-5)


def test_bits_are_those_of_the_rows(whole: tuple[Path, Found]) -> None:
    found = whole[1]
    positions = 32 / (2 * WIDTH * LAYERS)
    for bits in (2,):
        higgs, nearest = (
            found["bits", f"{name}, {bits} bits"]["bits"] for name in ("higgs", "round-to-nearest")
        )
        assert higgs == bits + 16 / WIDTH and nearest == bits + 32 / 64
        aqua = found["bits", f"aqua, {bits} bits"]["bits"]
        assert aqua == pytest.approx(bits + 16 / WIDTH + (4 - bits) / LAYERS + positions)
    # The model's dtype is fp32, in which a first layer of 16 bits is left.
    first = found["parts", "first layer: 16 bits"]["bits"]
    assert first == pytest.approx((32 + 2 + 16 / WIDTH) / 2 + positions)
    assert found["bits", "full"]["bits"] == 32
    # After RoPE nothing is turned back, so no positions are kept.
    after = found["parts", "keys: after RoPE"]["bits"]
    assert after == pytest.approx(found["parts", "aqua"]["bits"] - positions)


def test_predictors_are_counted_beside_the_rows(whole: tuple[Path, Found]) -> None:
    def held(name: str) -> int:
        return whole[1]["parts", name]["predictor_bytes"]

    # One predicted layer: its matrices in the model's fp32, and biases; frequencies of both.
    rest = 2 * 4 * WIDTH + LAYERS * 4 * 32
    assert held("aqua") == 3 * WIDTH**2 * 4 + rest
    assert held("predictors: linear, 4 bits (GPTQ)") == 3 * WIDTH**2 // 2 + 3 * WIDTH * 4 + rest
    rank = WIDTH // 4
    assert held("predictors: reduced rank") == 5 * rank * WIDTH * 4 + rest
    assert held("inputs: no predictors (HIGGS)") == 0


def test_the_artifacts_are_what_they_are_called(whole: tuple[Path, Found]) -> None:
    home, found = whole[0] / "a-artifacts", whole[1]
    folders = sorted(path.name for path in home.iterdir())
    # Anchors every two layers or more are the first layer alone, in a model of two.
    assert not [name for name in folders if "anchor_every" in name]
    assert "predictor-low_rank_rank-32" in folders
    for folder, options in (
        ("usual", {"bits": 2, "first_bits": 4, "sinks": 4, "space": "before"}),
        ("bits-16_first_bits-16", {"bits": 16, "first_bits": 16}),
        ("sinks-64", {"bits": 2, "sinks": 64}),
    ):
        artifact = CalibrationArtifact.from_pretrained(home / folder, method="aqua")
        assert {name: artifact.options[name] for name in options} == options
    usual = CalibrationArtifact.from_pretrained(home / "usual").quality
    assert found["variance", "2 bits"]["layers"] == [dict(one) for one in usual]
    assert found["parts", "anchors: every 2 layers"]["ppl"] == found["parts", "aqua"]["ppl"]


def test_artifacts_that_fit_are_used_and_others_refused(
    measured: Any,
    refused: Any,
    whole: tuple[Path, Found],
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr(calibrated, "calibrate", forbidden)
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--parts", "variance"]
    arguments += ["--artifacts", str(whole[0] / "a-artifacts")]
    found = _run(measured, tmp_path / "b.json", *arguments)
    for name, one in found.items():
        known = whole[1][name]
        assert {**one, "seconds": 0} == {**known, "seconds": 0}
    for changed, message in (
        (("--ridge", "0.5"), "ridge was 0.001, now 0.5"),
        (("--calibration-tokens", "300"), "tokens was 450, now 300"),
    ):
        error = refused(MEASUREMENT, *arguments, *changed)
        assert "holds an artifact of another calibration" in error and message in error


def test_without_a_text_documents_of_needles_are_read(measured: Any, tmp_path: Path) -> None:
    arguments = ["--model", "needle", "--caches", AQUA, "--parts", "layers", "--step", "32"]
    arguments += ["--context", "128", "--windows", "2"]
    (found,) = _run(measured, tmp_path / "n.json", *arguments).values()
    assert len(found["full"]["window_nats"]) == 2 and len(found["layers"]) == 3
    assert len({found["full"]["ppl"], *(one["ppl"] for one in found["layers"])}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--caches", "flat,aqua"), "--caches flat: aqua-ablation is about aqua, so name aqua"),
        (("--caches", "aqua:bits=3"), "chooses bits itself, leave it out; --artifacts names"),
        (("--parts", "bit"), "--parts: unknown: bit; choose among bits, parts, variance, layers"),
        (("--step", "33"), "--step 33: beyond max_draft (32)"),
        (("--memory-layers", "1"), "--memory-layers: '1' is no whole number from 2"),
        (("--calibration-tokens", "150"), "at least two, one of them measures errors"),
        (("--context", "150,1M"), "tokens beside those of the calibration"),
        (("--calibration-text", "missing.txt"), "--calibration-text missing.txt: no such file"),
        (("--context", "20"), "nothing was cold: take a longer --context"),
        (("--model", "needle"), "aqua-ablation needs a tokenizer"),
    ],
)
def test_mistakes_are_one_line_each(
    refused: Any, tiny_model_dir: Path, tiny_text: Path, arguments: tuple[str, ...], message: str
) -> None:
    known = [*_arguments(tiny_model_dir, tiny_text), "--parts", "bits"]
    assert message in refused(MEASUREMENT, *known, *arguments)
