"""Triton kernels that the library launches on a GPU of compute capability 9.0, compiled on a CPU.

The library launches them itself, with tensors on the CPU: a cache of one layer is filled, and takes
steps as ``DecodeGraph`` does, over a flush and on. Kernels are compiled and not run, so what they
would write are zeros. ``compile_steps`` does it in a process of its own, into Triton's cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from machine_code import compile_instead_of_launching
from torch.nn import functional
from transformers import PreTrainedModel

import hf_kvret_kernels
from hf_kvret import attach
from hf_kvret.lab.bench.filling import LayerRows, feed, fill_randomly, make_stand_ins, random_tokens
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.bench.triton_cache import CachedStep, rewrite_groups
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.replay import DecodeGraph
from hf_kvret.replay.recorders import RECORDERS
from hf_kvret.replay.warm_up import warming_up
from hf_kvret_kernels import _dispatch

# A usual step, a rehearsal, a capture and a replay; after a flush too.
_STEPS, _NEW_TOKENS = 4, 600
# Where most machines have the GPU's driver: Triton 3.9 finds its utilities by this name.
_LIBCUDA_FOLDER, _LIBCUDA = "/lib/x86_64-linux-gnu", "libcuda.so.1"


def compile_steps(
    folder: Path, steps: Sequence[CachedStep], shape: str
) -> Iterator[dict[str, int]]:
    """Compile what ``steps`` of a layer of ``shape`` launch, in a process of its own.

    Yields after each step how many ``kernels``, ``launchers`` and ``bytes`` the folder then has.
    RuntimeError if the process fails; has the end of what it said.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(folder), json.dumps(steps), shape]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        )
        assert process.stdout is not None
        with process.stdout:
            yield from map(json.loads, process.stdout)
        if process.wait():
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{said.read()[-2000:]}")


def one_layer(shape: str) -> PreTrainedModel:
    """A model in bf16 whose one layer has the heads of ``shape``, and next to nothing else."""
    config = load_shape(shape).part("attention").with_layers(1)
    config.hidden_size = 64
    return random_model(config, torch.bfloat16, "cpu", seed=0)


@torch.inference_mode()
def take_steps(model: PreTrainedModel, choice: CacheChoice, context: int, batch: int) -> None:
    """Fill a cache of ``model``, and take steps over a flush."""
    attach(model)
    cache, options, length = choice.make(model.config, context), choice.options, context
    assert options is not None, "other caches have no kernels of ours"
    if options.prompt != "exact" or options.prefill_chunk != "auto":
        chunk = context if options.prefill_chunk in (None, "auto") else options.prefill_chunk
        cache.expect(context, chunk, _NEW_TOKENS)
        for number, tokens in enumerate(random_tokens(model, batch, context, 0).split(chunk, 1)):
            feed(model, cache, tokens, number * chunk)
    else:
        cache.expect(context, context, _NEW_TOKENS)
        config, place = model.config, {"device": model.device, "dtype": model.dtype}
        rows = LayerRows(config.num_key_value_heads, config.head_dim, config.head_dim, 1.0, 1.0)
        fill_randomly(config, cache, [rows], batch, context, 0, **place)
    step, kv = DecodeGraph(model, cache), cache.retrieval_layers[0].kv
    token, left, cold_len = random_tokens(model, batch, 1, 0), _STEPS, kv.cold_len
    while left:
        positions = torch.full((batch, 1), length, device=token.device)
        step(input_ids=token, position_ids=positions, past_key_values=cache, use_cache=True)
        length += 1
        left = _STEPS if kv.cold_len == cold_len else left - 1


def behave_as_on_a_gpu() -> None:
    """Let this process do with tensors on the CPU what it would do with those on a GPU."""
    attend = RetrievalLayer.attend

    def attend_warm(layer: RetrievalLayer, query: Any, key: Any, value: Any, call: Any) -> Any:
        with warming_up(layer, query, call):
            return attend(layer, query, key, value, call)

    RetrievalLayer.attend = attend_warm  # type: ignore[method-assign]
    # Steps run as they are captured, and replays do nothing.
    RECORDERS["cpu"] = lambda device: SimpleNamespace(
        rehearse=lambda step: (step(), None), record=lambda step: (step(), lambda: None)
    )
    torch.cuda.is_current_stream_capturing = lambda: False
    # Lets kernels have tensors on the CPU. Their modules must not believe it, as they have others
    # for the interpreter, and take the function by its name when they are imported.
    for module in pkgutil.walk_packages(hf_kvret_kernels.__path__, "hf_kvret_kernels."):
        if "triton" in module.name:
            importlib.import_module(module.name)
    _dispatch.interpreted = lambda: True
    # Torch's attention to a prompt takes minutes, and has no kernel of Triton.
    functional.scaled_dot_product_attention = lambda query, key, value, **_: query.new_zeros(
        *query.shape[:-1], value.shape[-1]
    )
    # Kernels write nothing here, and torch may take what stands in a result for an index.
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]


def build_launchers(kernels: Iterable[Any]) -> None:
    """Compile what Triton makes with gcc when it launches ``kernels``; nothing is loaded."""
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import build

    knobs.nvidia.libcuda_path = _LIBCUDA_FOLDER
    build._load_module_from_path = lambda name, path: MagicMock()
    # Triton has the program "file" say what Python is, which not every machine has.
    for kind in ("ELF", ""):
        words = platform.machine(), platform.system(), "64bit", kind
        build.platform_key = partial(",".join, words)
        vars(driver.CudaUtils).get("instance") and delattr(driver.CudaUtils, "instance")
        driver.CudaUtils()
        # Triton 3.9 has one launcher for all kernels, among the utilities.
        for kernel in kernels if hasattr(driver, "make_launcher") else ():
            driver.CudaLauncher(kernel.src, kernel.metadata)


def make_libcuda(folder: Path) -> None:
    """Have launchers linked with a library in ``folder`` that has the names of the GPU driver's.

    With none of them the linker might leave the driver out, and no launcher could be loaded.
    """
    from triton.backends.nvidia import driver

    text = Path(driver.__file__).read_text() + Path(driver.dirname, "driver.c").read_text()
    source = "".join(f"int {name};" for name in set(re.findall(r"\bcu[A-Z]\w+", text)))
    command = ["gcc", "-shared", f"-Wl,-soname,{_LIBCUDA}", "-o", _LIBCUDA, "-xc", "-"]
    subprocess.run(command, cwd=folder, input=source, text=True, check=True)
    os.environ["LIBRARY_PATH"] = str(folder)


def fill_cache(folder: Path, steps: Sequence[CachedStep], shape: str) -> Iterator[Path]:
    """As ``compile_steps``, for good in this process; yields the folder after each step."""
    os.environ |= {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    rewrite_groups(folder)
    compiled = compile_instead_of_launching()
    from triton.compiler.compiler import CompiledKernel

    # Nothing is loaded, either.
    CompiledKernel._init_handles = lambda self: None
    with tempfile.TemporaryDirectory() as home:
        model, choices = one_layer(shape), [choose_cache(text) for text, _, _ in steps]
        make_stand_ins([model], choices, Path(home), seed=0)
        make_libcuda(Path(home))
        behave_as_on_a_gpu()
        for choice, (_, context, batch) in zip(choices, steps, strict=True):
            with _dispatch.prefer("triton"):
                take_steps(model, choice, context, batch)
            build_launchers({kernel.hash: kernel for _, _, kernel in compiled}.values())
            compiled.clear()
            yield folder


def main() -> None:
    """Fill a folder; prints a line of JSON after each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("steps", type=json.loads)
    parser.add_argument("shape")
    for folder in fill_cache(**vars(parser.parse_args())):
        files = [path for path in folder.rglob("*") if path.is_file()]
        counts = {
            "kernels": sum(path.name.startswith("__grp__") for path in files),
            "launchers": sum(path.suffix == ".so" for path in files),
            "bytes": sum(path.stat().st_size for path in files),
        }
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
