"""Mutated artifacts: each is refused before the first token, or is the same, or works to the end.

*Damage* leaves checksums as they are: what loads must be what was saved. *Lies* have right
checksums, as those of a stranger who means harm: what is not refused must serve whole passes with
finite numbers, and never pass for the artifact that ``artifact_sha256`` names.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret.artifacts import CalibrationArtifact, files
from hf_kvret.registry import registered_methods
from hf_kvret.testing import COVERING_OPTIONS

SAVED = Path(__file__).parents[1] / "fixtures" / "saved"
METHODS = ("a2ats", "aqua")
COUNT, PARTS = 600, 15
VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 1, 10**9, 2**62, 1e308, 0.5, True, False),
    *("x", "", "../../x", [], {}, [1], [[]], {"a": 1}),
)
DTYPES = (
    *(torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
)
BOMBS = (
    *(b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"", b"[" * 70 + b"]" * 70),
    *(b'{"format_version": 1, "data": NaN}', b'{"format_version": ' + b"9" * 5000 + b"}"),
)
Tensors = dict[str, torch.Tensor]


class Artifact(NamedTuple):
    """A whole one, to be mutated."""

    tensors: Tensors
    description: dict[str, Any]
    sha256: str


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(SAVED / "model")
    hf_kvret.attach(model)
    return model.eval()


@pytest.fixture(scope="module")
def whole() -> dict[str, Artifact]:
    """The artifacts of the fixtures, by method."""
    result = {}
    for method in METHODS:
        artifact = CalibrationArtifact.from_pretrained(SAVED / "artifacts" / method)
        described = json.loads((SAVED / "artifacts" / method / "config.json").read_text())
        result[method] = Artifact(dict(artifact.tensors), described, artifact.sha256)
    return result


# --- mutations -------------------------------------------------------------------------------


def _pick(rng: random.Random, tensors: Tensors) -> str:
    return rng.choice(sorted(tensors))


def tensor_shape(rng: random.Random, tensors: Tensors) -> None:
    name = _pick(rng, tensors)
    x, axis = tensors[name], rng.randrange(tensors[name].ndim)
    shapes = (
        lambda: x.narrow(axis, 0, max(0, x.shape[axis] - 1)),
        lambda: torch.cat([x, x], axis),
        lambda: x.narrow(axis, 0, 0),
        lambda: x.unsqueeze(axis),
        lambda: x.narrow(axis, 0, 1),
        lambda: x.flatten() if x.ndim > 1 else x[None],
    )
    tensors[name] = rng.choice(shapes)()


def tensor_dtype(rng: random.Random, tensors: Tensors) -> None:
    name = _pick(rng, tensors)
    tensors[name] = tensors[name].to(rng.choice([d for d in DTYPES if d != tensors[name].dtype]))


def tensor_number(rng: random.Random, tensors: Tensors) -> None:
    name = _pick(rng, tensors)
    x = tensors[name].clone().flatten()
    x[rng.randrange(len(x))] = rng.choice([float("nan"), float("inf"), 3e38, -1e38, 1e11, 0.0])
    tensors[name] = x.view(tensors[name].shape)


def tensor_constant(rng: random.Random, tensors: Tensors) -> None:
    name = _pick(rng, tensors)
    tensors[name] = torch.full_like(tensors[name], rng.choice([0.0, 0.37, -1.0, 1e30, 1e-30]))


def tensor_missing(rng: random.Random, tensors: Tensors) -> None:
    del tensors[_pick(rng, tensors)]


def tensor_extra(rng: random.Random, tensors: Tensors) -> None:
    names = ("../../x", "layers.99.codewords", "layers.0.key.x.codes", "/etc/passwd", "layers.1.x")
    tensors[rng.choice(names)] = torch.zeros(4)


def tensor_swap(rng: random.Random, tensors: Tensors) -> None:
    one, other = rng.sample(sorted(tensors), 2)
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


def told_top(rng: random.Random, told: dict[str, Any]) -> None:
    told[rng.choice(sorted(told))] = rng.choice(VALUES)


def told_option(rng: random.Random, told: dict[str, Any]) -> None:
    told["options"][rng.choice([*sorted(told["options"]), "unknown"])] = rng.choice(VALUES)


def told_layer(rng: random.Random, told: dict[str, Any]) -> None:
    layer = told["options"]["layers"][rng.choice(sorted(told["options"]["layers"]))]
    layer[rng.choice([*sorted(layer), "last"])] = rng.choice(VALUES)


def told_layers(rng: random.Random, told: dict[str, Any]) -> None:
    layers = told["options"]["layers"]
    name = rng.choice(["9", "-1", "x", "00", "٣", " 1"])
    layers[name] = layers[rng.choice(sorted(layers))]


def told_fact(rng: random.Random, told: dict[str, Any]) -> None:
    model = told["model"]
    model["facts"][rng.choice(sorted(model["facts"]))] = rng.choice(VALUES)
    plain = json.dumps(model["facts"], sort_keys=True, separators=(",", ":"))
    model["sha256"] = hashlib.sha256(plain.encode()).hexdigest()


def told_weights(rng: random.Random, told: dict[str, Any]) -> None:
    huge = [{"name": "x", "shape": [2**62], "values": [0] * 16}]
    other = [{"name": "embed_tokens.weight", "shape": [128, 64], "values": [9.0] * 16}]
    told["model"]["weights"] = rng.choice([*VALUES, huge, other])


def told_method(rng: random.Random, told: dict[str, Any]) -> None:
    names = [name for name in (*METHODS, "x", "../x", "A", "") if name != told["method"]]
    told["method"] = rng.choice(names)


def told_files(rng: random.Random, told: dict[str, Any]) -> None:
    told["files"] = {"tensors": rng.choice(["../a.safetensors", "README.md", *VALUES])}


def _tensor_file(folder: Path) -> Path:
    return next(folder.glob("artifact*.safetensors"))


def _change(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def file_cut(rng: random.Random, folder: Path) -> None:
    path = rng.choice([_tensor_file(folder), folder / "config.json"])
    # Not only the last end of line.
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size - 2)])


def file_flip(rng: random.Random, folder: Path) -> None:
    path = rng.choice([_tensor_file(folder), folder / "config.json"])
    _flip(rng, path, path.stat().st_size)


def file_flip_header(rng: random.Random, folder: Path) -> None:
    path = _tensor_file(folder)
    _flip(rng, path, 8 + struct.unpack("<Q", path.read_bytes()[:8])[0])


def _flip(rng: random.Random, path: Path, size: int) -> None:
    place, bit = rng.randrange(size), 1 << rng.randrange(8)
    _change(path, lambda content: content.__setitem__(place, content[place] ^ bit))


def file_longer(rng: random.Random, folder: Path) -> None:
    path = rng.choice([_tensor_file(folder), folder / "config.json"])
    _change(path, lambda content: content.extend(b"xxxxxxxx"))


def file_bomb(rng: random.Random, folder: Path) -> None:
    (folder / "config.json").write_bytes(rng.choice(BOMBS))


def file_huge(rng: random.Random, folder: Path) -> None:
    """Shapes that claim more than there is, in a file whose checksum is right."""
    path = _tensor_file(folder)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    entry = header[rng.choice(sorted(header.keys() - {"__metadata__"}))]
    entry["shape"] = rng.choice([[2**40], [2**62, 4], [2**63], [-1]])
    entry["dtype"] = rng.choice([entry["dtype"], "F8_E4M3", "F4", "U64", "X"])
    told = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(told)) + told + content[8 + length :])
    description = json.loads((folder / "config.json").read_text())
    description["tensors_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    _seal(description)
    (folder / "config.json").write_text(json.dumps(description))


def file_kind(rng: random.Random, folder: Path) -> None:
    path = rng.choice([_tensor_file(folder), folder / "config.json"])
    path.unlink()
    what = rng.choice(["folder", "device", "nowhere", "empty"])
    if what == "folder":
        path.mkdir()
    elif what == "empty":
        path.touch()
    else:
        path.symlink_to("/dev/zero" if what == "device" else folder / "none")


TENSOR_LIES = (
    *(tensor_shape, tensor_dtype, tensor_number, tensor_constant),
    *(tensor_missing, tensor_extra, tensor_swap),
)
TOLD_LIES = (
    *(told_top, told_option, told_layer, told_layers),
    *(told_fact, told_weights, told_method, told_files),
)
FILE_LIES = (file_bomb, file_huge, file_kind)
DAMAGES = (file_cut, file_flip, file_flip_header, file_longer)
MUTATIONS = (*TENSOR_LIES, *TOLD_LIES, *FILE_LIES, *DAMAGES)


def _seal(description: dict[str, Any]) -> None:
    description["description_sha256"] = files._digest(description)


def _write(
    rng: random.Random, mutation: Any, artifact: Artifact, of_hub: bool, folder: Path
) -> None:
    tensors, description = dict(artifact.tensors), copy.deepcopy(artifact.description)
    if mutation in TENSOR_LIES:
        mutation(rng, tensors)
    content = save({name: x.contiguous().clone() for name, x in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = "artifact.safetensors" if of_hub else f"artifact-{digest[:12]}.safetensors"
    description |= {"tensors": files._list(tensors), "tensors_sha256": digest}
    description["files"] = {"tensors": name}
    if mutation in TOLD_LIES:
        mutation(rng, description)
    _seal(description)
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(description, indent=1))
    if mutation in (*FILE_LIES, *DAMAGES):
        mutation(rng, folder)


# --- what must hold ---------------------------------------------------------------------------


def _cache(model: PreTrainedModel, method: str, folder: Path, **options: Any) -> Any:
    options = {**COVERING_OPTIONS, **({"top_k": 4} if method == "a2ats" else {}), **options}
    cache = registered_methods()[method](model.config, artifact=str(folder), **options)
    # As generate does before the first token.
    cache.check_model(model)
    return cache


def _served(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    """Logits of passes that reach codes, codewords and predictors of every layer."""
    generator, outputs = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for count in (60, 1, 6, 1, 1):
            ids = torch.randint(3, 120, (1, count), generator=generator)
            outputs.append(model(ids, past_key_values=cache).logits)
    return torch.cat(outputs, 1)


@pytest.mark.filterwarnings("ignore:the weights of the model can't be compared")
@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))],
)
def test_a_mutated_artifact_is_refused_or_the_same_or_works(
    part: int, model: PreTrainedModel, whole: dict[str, Artifact], tmp_path: Path
) -> None:
    refused = same = lies = 0
    for number in range(part, COUNT, PARTS):
        rng = random.Random(number)
        mutation = MUTATIONS[(number // PARTS + part) % len(MUTATIONS)]
        method, of_hub = rng.choice(METHODS), rng.choice((True, False))
        what = f"case {number}, {mutation.__name__}, {method}, {of_hub=}"
        artifact, folder = whole[method], tmp_path / str(number)
        _write(rng, mutation, artifact, of_hub, folder)
        try:
            cache = _cache(model, method, folder)
        except (OSError, ValueError) as error:
            assert str(error), what
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__} instead of a refusal") from error
        loaded = CalibrationArtifact.from_pretrained(folder)
        if loaded.sha256 == artifact.sha256:
            same += 1
        else:
            assert mutation not in DAMAGES, f"{what}: loaded with other content"
            lies += 1
            with pytest.raises(ValueError, match="artifact_sha256 asks for"):
                _cache(model, method, folder, artifact_sha256=artifact.sha256)
        try:
            logits = _served(model, cache)
        except Exception as error:
            raise AssertionError(f"{what}: accepted, and broke off in a pass") from error
        assert bool(logits.isfinite().all()), f"{what}: accepted, and not finite"
        shutil.rmtree(folder)
    assert refused > same + lies, "most mutations are no artifact"


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_mutated_is_served(
    method: str, model: PreTrainedModel, whole: dict[str, Artifact], tmp_path: Path
) -> None:
    """The programs above refuse what is wrong, and nothing else."""
    for of_hub in (True, False):
        folder = tmp_path / f"{of_hub}"
        _write(random.Random(0), None, whole[method], of_hub, folder)
        pinned = {"artifact_sha256": whole[method].sha256}
        logits = _served(model, _cache(model, method, folder, **pinned))
        plain = _served(model, _cache(model, method, SAVED / "artifacts" / method))
        assert torch.equal(logits, plain)


def test_codewords_and_rotations_of_nothing_are_refused(
    model: PreTrainedModel, whole: dict[str, Artifact], tmp_path: Path
) -> None:
    """What a checksum can't find: all codewords zero, and frequencies of another rotation."""
    names = {"codewords": 0.0, "inv_freq": 0.37}
    for part, number in names.items():
        tensors = {
            name: torch.full_like(x, number) if name.endswith(part) else x
            for name, x in whole["a2ats"].tensors.items()
        }
        lying = whole["a2ats"]._replace(tensors=tensors)
        _write(random.Random(0), None, lying, False, tmp_path / part)
        words = "codewords that are all equal" if part == "codewords" else "frequencies for layer 0"
        with pytest.raises(ValueError, match=words):
            _cache(model, "a2ats", tmp_path / part)
