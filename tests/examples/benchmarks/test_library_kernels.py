"""``hf-kvret bench machine-code --cache``: what a simulated GPU launches is in the cache.

As a program it fills one with a step, moves it, and looks the launches up there. One step has
kernels without code, which takes the most time: Triton makes their keys before.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_kvret.lab.bench.filling import make_stand_ins
from hf_kvret.lab.bench.triton_cache import rewrite_groups
from hf_kvret.lab.evaluate.caches import choose_cache

sys.path.append(str(Path(__file__).parents[3] / "examples" / "benchmarks"))
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "eos_token_id": None,
    "max_position_embeddings": 1 << 17,
}  # fmt: skip
WINDOW = "sink=4:recent=6:flush=4:dense_below=0:max_draft=1"
METHODS = ("flat:top_k=4", "paris:top_k=4:subspace_dim=4", "lrqk:top_k=4", "ctkvr:top_k=4")
STORES = ("store=host", "store=resident", "store=higgs", "store=split:device_budget=4KB")
STEPS = (
    *(f"{method}:{WINDOW}" for method in (*METHODS[1:], "a2ats:top_k=4", "aqua")),
    *(f"{method}:{WINDOW}:{store}" for method in METHODS for store in STORES),
    f"{METHODS[0]}:{WINDOW}:prefill_chunk=10",
)
SIZES = dict.fromkeys([f"{kind}_scratch_size" for kind in ("global", "profile")], 0)
NO_CODE = {"name": "kernel", "shared": 0, **SIZES} | dict.fromkeys(
    [name.replace("size", "align") for name in SIZES], 1
)
_TENSOR = "a tensor"


def launches_of(text: str, shape: str, folder: Path, patch: pytest.MonkeyPatch) -> list[Any]:
    """Module, name and arguments of each kernel that a step launches on a simulated GPU."""
    from library_kernels import one_layer, take_steps

    from hf_kvret_kernels import _triton_shared
    from hf_kvret_kernels.paris import triton as paris

    from ...simulated_gpu import launches
    from ...simulated_gpu.device import simulated, to_device

    kernels, note, generator = set(), launches._note_specialisation, torch.Generator

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if isinstance(value, torch.dtype):
            return _TENSOR, value, True
        aligned = isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0
        return (_TENSOR, value.dtype, aligned) if isinstance(value, torch.Tensor) else value

    def note_too(gpu: Any, kernel: Any, constants: Any, named: Any, given: Any) -> None:
        arguments = {name: plain(value) for name, value in (given | named).items()}
        kernels.add(pickle.dumps((kernel.__module__, kernel.__name__, arguments)))
        note(gpu, kernel, constants, named, given)

    patch.setattr(launches, "_note_specialisation", note_too)
    patch.setattr(torch, "Generator", lambda device=None: generator())
    for module in (_triton_shared, paris):
        # The kernels of a GPU, though the interpreter runs them.
        patch.setattr(module, "interpreted", lambda: False)
    model, choice = one_layer(shape), choose_cache(text, device="cuda")
    make_stand_ins([model], [choice], folder, 0)
    with simulated():
        to_device(model)
        take_steps(model, choice, 30, 1)
    return [pickle.loads(one) for one in kernels]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options"),
    [(f"{METHODS[0]}:{WINDOW}", ["without code"]), *((text, []) for text in STEPS)],
)
def test_every_launch_of_a_simulated_step_is_found_in_a_moved_cache(
    text: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    shape = str(tmp_path / "shape")
    LlamaConfig(**SHAPE).save_pretrained(shape)
    launches = launches_of(text, shape, tmp_path, monkeypatch)
    assert len(launches) > 5
    (tmp_path / "launches").write_bytes(pickle.dumps(launches))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(tmp_path), text, shape, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def fill_and_look_up(home: Path, text: str, shape: str, *options: str) -> None:
    """Fill a cache with a step, move it, and look up the launches in ``home`` there."""
    from library_kernels import build_launchers, fill_cache
    from triton.backends.nvidia.compiler import CUDABackend

    moved, kernels = home / "moved", []

    def no_code(module: Any, metadata: dict[str, Any]) -> bytes:
        return metadata.update(NO_CODE) or b""

    def add_stages(backend: Any, stages: Any, *others: Any) -> None:
        assert not moved.exists(), "a kernel is compiled again"
        stages |= {"ttir": no_code, "cubin": no_code}

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and "--version" not in arguments[1]:
            name = Path(arguments[1][0]).name
            assert not name.startswith(("ptxas", "gcc", "cc", "clang")), f"{name} is called"

    def made(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        is_tensor, (_, dtype, aligned) = value[:1] == (_TENSOR,), (*value, 0, 0, 0)[:3]
        return torch.zeros(32, dtype=dtype)[not aligned :] if is_tensor else (*map(made, value),)

    if options:
        CUDABackend.add_stages = add_stages
    (filled,) = fill_cache(home / "filled", [(text, 30, 1)], shape)
    os.environ["TRITON_CACHE_DIR"] = str(filled.rename(moved))
    assert rewrite_groups(moved) > 5
    # Loading one loads the GPU's driver.
    assert all(b"\0libcuda.so.1\0" in one.read_bytes() for one in moved.glob("*/*.so"))
    sys.addaudithook(refuse)
    for module, name, arguments in pickle.loads((home / "launches").read_bytes()):
        kernel = getattr(importlib.import_module(module), name)
        # It must not find what it has compiled in this process.
        kernel.device_caches.clear()
        given = {name: made(value) for name, value in arguments.items()}
        kernels.append(kernel.warmup(grid=(1,), **given))
    build_launchers(kernels)


if __name__ == "__main__":
    fill_and_look_up(Path(sys.argv[1]), *sys.argv[2:])
