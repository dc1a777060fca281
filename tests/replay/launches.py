"""Launches of a compiled decoder layer on an H200, from the code that Inductor writes for one.

    python -m tests.replay.launches

A layer of an 8B shape is traced in a decode step. Its graph is compiled for tensors without
contents, on a device that is not there. What is counted are the calls in the code that torch would
run at each step, but for that of attention.
"""

import json
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.device_interface import get_interface_for_device
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton
from transformers import AutoConfig, AutoModelForCausalLM
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hf_kvret import DecodeGraph, FlatKVCache, attach
from hf_kvret.models.versions import as_argument
from hf_kvret.replay import compiled_layers

# Types of models, and their intermediate size.
_SHAPES = {"llama": 14336, "qwen3": 12288}
_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block_optin=232448, L2_cache_size=60 << 20, gcnArchName="",
)  # fmt: skip
_CALL = re.compile(r"(extern_kernels\.\w+|triton_\w+\.run|torch\.ops\.[\w.]+|aten\.\w+)\(")


def traced(kind: str) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The graph of a layer in a decode step of one sequence, and its inputs."""
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=4096, intermediate_size=_SHAPES[kind], num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.to_empty(device="cpu")
    attach(model)
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    cache, token = FlatKVCache(config, compile=True), torch.ones(1, 1, dtype=torch.long)
    with mock.patch.object(compiled_layers, "BACKEND", keep), torch.no_grad():
        step = DecodeGraph(model, cache)
        for position in range(3):
            places = torch.full_like(token, position)
            step(input_ids=token, position_ids=places, **as_argument(cache), use_cache=True)
    return graphs[0]


def written(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> str:
    """What Inductor writes for a graph, once the machine pretends to have an H200."""
    code: list[str] = []

    def keep(self: Any) -> None:
        code.append(str(getattr(self.codegen()[0], "value", "")))
        raise RuntimeError("all is written, and nothing is to be built")

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad(), mock.patch.object(GraphLowering, "compile_to_module", keep):
        near, far = (
            [torch.empty(x.shape, dtype=x.dtype, device=device) for x in inputs]
            for device in ("cpu", "cuda:0")
        )
        # Python's indexing of tensors asks a driver, which operations do not.
        operations = torch.fx.Interpreter(make_fx(graph, tracing_mode="real")(*near)).run
        placed = make_fx(operations, select_decomp_table(), "real")(*far)
        _recursive_joint_graph_passes(placed)
        with V.set_fake_mode(mode), pytest.raises(InductorError, match="all is written"):
            compile_fx_inner(placed, far)
    return code[0]


def pretend() -> None:
    """Have torch and Triton find an H200, to the end of the process."""
    answers: dict[str, Any] = {
        "get_device_properties": _H200, "get_device_capability": (9, 0), "current_device": 0,
        "is_available": True, "device_count": 1, "_exchange_device": 0, "_lazy_init": None,
        "_maybe_exchange_device": 0, "synchronize": None, "get_rng_state": torch.empty(0),
        "set_rng_state": None, "get_compute_capability": 90, "is_triton_capable": True,
        "get_raw_stream": 0, "raise_if_triton_unavailable": None, "is_bf16_supported": True,
    }  # fmt: skip
    interface: Any = get_interface_for_device("cuda")
    for home in (torch.cuda, interface, interface.Worker):
        for name, answer in answers.items():
            if hasattr(home, name):
                setattr(home, name, mock.Mock(return_value=answer))
    # Its patterns are made of tensors on the device.
    joint_graph.lazy_init = mock.Mock()
    has_triton.cache_clear()
    target = mock.Mock(**{"get_current_target.return_value": GPUTarget("cuda", 90, 32)})
    target.get_current_device.return_value = target.get_current_stream.return_value = 0
    driver.set_active(target)


if __name__ == "__main__":
    graphs = {kind: traced(kind) for kind in _SHAPES}
    pretend()
    texts = {kind: written(*graph).partition("def call(")[2] for kind, graph in graphs.items()}
    print(json.dumps({kind: len(_CALL.findall(text)) - 1 for kind, text in texts.items()}))
