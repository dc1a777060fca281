"""Which requests of vLLM's batches select. vLLM is not installed: its names are stood in for."""

import importlib
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hf_kvret.vllm import VARIABLE

LAYERS: dict[str, Any] = {}


class Chunked:
    """Stands in for the spec of layers with chunks of their own."""

    block_size = 16


def fake_vllm(config: Any) -> dict[str, ModuleType]:
    names = {
        "vllm.config": {
            "get_current_vllm_config": lambda: config,
            "get_layers_from_vllm_config": lambda *_: LAYERS,
        },
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": object},
        "vllm.v1.attention.backend": {
            "AttentionBackend": object,
            "AttentionCGSupport": Enum("AttentionCGSupport", ["NEVER"]),
            "AttentionType": SimpleNamespace(DECODER="decoder", ENCODER_DECODER="cross"),
        },
        "vllm.v1.kv_cache_interface": {"ChunkedLocalAttentionSpec": Chunked},
    }
    modules = {}
    for name, values in names.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(values)
    return modules


@pytest.fixture
def config() -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(enable_prefix_caching=True, mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, use_ubatching=False),
        kv_transfer_config=None,
    )


@pytest.fixture
def selecting(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in fake_vllm(config).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(VARIABLE, "paris:top_k=8:recent=16:flush=1:dense_below=0")
    sys.modules.pop("hf_kvret.vllm.selecting", None)
    LAYERS["layer"] = SimpleNamespace(impl=SimpleNamespace(selects=True))
    yield importlib.import_module("hf_kvret.vllm.selecting")
    LAYERS.clear()
    sys.modules.pop("hf_kvret.vllm.selecting", None)


def builder(selecting: Any, config: Any, spec: Any) -> Any:
    class Base:
        def __init__(self, *_: Any) -> None: ...

        def build(self, *_: Any) -> Any:
            return SimpleNamespace()

    class Builder(selecting.SelectingBuilder, Base):  # type: ignore[misc]
        pass

    return Builder(spec, ["layer"], config, torch.device("cpu"))


def batch(lens: list[int], seq_lens: list[int], prefilling: list[bool], pad: int = 0) -> Any:
    """A batch of requests with ``lens`` queries each; ``pad`` requests of none follow."""
    ends = torch.tensor([0, *lens, *[0] * pad]).cumsum(0).int()
    count = len(lens) + pad
    return SimpleNamespace(
        num_reqs=count,
        num_actual_tokens=sum(lens),
        query_start_loc_cpu=ends,
        seq_lens=torch.tensor([*seq_lens, *[0] * pad]),
        block_table_tensor=torch.arange(count * 16, dtype=torch.int32).view(count, 16),
        slot_mapping=torch.full((sum(lens),), -1),
        is_prefilling=torch.tensor([*prefilling, *[False] * pad]),
        causal=True,
    )


SPEC = SimpleNamespace(block_size=16)


def test_requests_that_decode_select_whatever_is_beside(selecting: Any, config: Any) -> None:
    one = builder(selecting, config, SPEC)
    steps = one.build(0, batch([1, 5, 1, 1], [70, 90, 60, 80], [False, True, True, False])).steps
    # The third one reads the last token of a prompt.
    assert steps.rows.tolist() == [0, 7] and steps.lengths == [70, 80] and not steps.is_all
    assert steps.table[:, 0].tolist() == [0, 48]
    steps = one.build(0, batch([1, 1], [70, 80], [False, False], pad=2)).steps
    assert steps.rows.tolist() == [0, 1] and steps.is_all


def test_prompts_drafts_and_other_masks_stay_dense(selecting: Any, config: Any) -> None:
    one = builder(selecting, config, SPEC)
    assert one.build(0, batch([5, 4], [5, 90], [True, False])).steps is None
    other = batch([1], [70], [False])
    other.causal = False
    assert one.build(0, other).steps is None
    chunked = builder(selecting, config, Chunked())
    assert chunked.build(0, batch([1], [70], [False])).steps is None


def test_a_model_without_full_attention_is_refused(selecting: Any, config: Any) -> None:
    LAYERS["layer"].impl.selects = False
    with pytest.raises(ValueError, match=f"no layer of this model.*unset {VARIABLE}"):
        builder(selecting, config, SPEC)


USUAL: dict[str, Any] = {
    "attn_type": "decoder", "sliding_window": None, "alibi_slopes": None, "sinks": None,
    "kv_sharing_target_layer_name": None, "kv_cache_dtype": "auto", "head_size": 64,
    "logits_soft_cap": 0, "scale": 0.5,
}  # fmt: skip


def attention(selecting: Any, **changes: Any) -> Any:
    class Base:
        def __init__(self) -> None:
            vars(self).update(USUAL | changes)

        def forward(self, *arguments: Any) -> Any:
            arguments[6].fill_(7.0)
            return arguments[6]

    class Attention(selecting.SelectingAttention, Base):  # type: ignore[misc]
        pass

    return Attention()


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("layer", "sinks", torch.zeros(4), "learned attention sinks"),
        ("layer", "alibi_slopes", [1.0], "ALiBi"),
        ("layer", "kv_cache_dtype", "fp8", "kv_cache_dtype=fp8"),
        ("layer", "kv_sharing_target_layer_name", "layer", "layers that read another's keys"),
        ("layer", "attn_type", "cross", "cross attention"),
        ("layer", "head_size", 2048, "head dim 2048"),
        ("parallel_config", "use_ubatching", True, "microbatches"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallel"),
        ("cache_config", "mamba_cache_mode", "align", "mamba_cache_mode='align'"),
        ("", "kv_transfer_config", object(), "KV connector"),
    ],
)
def test_layers_and_engines_that_it_can_t_serve_are_refused(
    selecting: Any, config: Any, part: str, name: str, value: Any, words: str
) -> None:
    if part != "layer":
        setattr(getattr(config, part, config), name, value)
    with pytest.raises(ValueError, match=words):
        attention(selecting, **({name: value} if part == "layer" else {}))


@pytest.mark.parametrize("windows", [8, (7, 0)])
def test_a_sliding_layer_stays_as_it_is(selecting: Any, windows: Any) -> None:
    assert not attention(selecting, sliding_window=windows).selects
    assert attention(selecting, sliding_window=-1).selects
    assert attention(selecting, sliding_window=(-1, -1)).selects


def test_steps_are_put_among_what_vllm_gave_the_others(selecting: Any, config: Any) -> None:
    one, layer = builder(selecting, config, SPEC), attention(selecting)
    metadata = one.build(0, batch([3, 1], [90, 70], [True, False]))
    pages = torch.randn(32, 2, 16, 128, generator=torch.Generator().manual_seed(0))
    query, output = torch.randn(4, 4, 64), torch.zeros(4, 4 * 64)
    place = SimpleNamespace(layer_name="layer")
    assert layer.forward(place, query, None, None, pages, metadata, output) is output
    assert (output[:3] == 7).all() and not (output[3] == 7).any()
    nothing = torch.zeros(4, 4 * 64)
    layer.forward(place, query, None, None, pages, None, nothing)
    assert (nothing == 7).all()
