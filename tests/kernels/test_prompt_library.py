"""prompt_attention in the compiled library, on each of its instruction sets."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_library as library, prompt_attention as package
from hf_kvret_kernels._dispatch import DenseCall, prefer
from hf_kvret_kernels.prompt_attention import prompt_attention

from .draws import attention_inputs
from .test_prompt_attention import check

LIBRARY = ("cpp", "cpu")
BF16 = "avx512_bf16"

pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.factor("path", library.PATHS, indirect=True),
]


# A tile has 480 rows of queries or fewer, a block 128 keys.
@pytest.mark.factor("threads", [1, 3], indirect=True)
@pytest.mark.factor("softcap", [None, 2.0])
@pytest.mark.factor("padded", [False, True])
@pytest.mark.factor("causal_offset", [None, -7, 0, 60])
@pytest.mark.factor("queries", [40, 300])
@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiles_and_threads_share_a_long_prompt(
    path: str,
    dtype: torch.dtype,
    queries: int,
    causal_offset: int | None,
    padded: bool,
    softcap: float | None,
    threads: int,
) -> None:
    tensors = attention_inputs(
        LIBRARY, heads=8, queries=queries, tokens=330, dims=(7, 130), dtype=dtype
    )
    valid = None
    if padded:
        valid = torch.rand(2, 330) > 0.3
        valid[1, :200] = False
    check(LIBRARY, *tensors, causal_offset, valid=valid, softcap=softcap)


@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_stay_in_their_queries(path: str, dtype: torch.dtype) -> None:
    query, key, value = attention_inputs(LIBRARY, queries=40, tokens=200, dtype=dtype)
    query[1, 2, 7] = float("nan")
    out, lse = prompt_attention(query, key, value, scale=0.3, causal_offset=160, backend=LIBRARY[0])
    assert out[1, 2, 7].isnan().all() and lse[1, 2, 7].isnan()
    out[1, 2, 7], lse[1, 2, 7] = 0.0, 0.0
    assert out.isfinite().all() and lse.isfinite().all()


def test_pairs_of_bf16_go_where_that_is_faster(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path != BF16:
        pytest.skip("other instruction sets have no pairs")
    tensors = attention_inputs(LIBRARY, queries=40, dtype=torch.bfloat16)
    call = DenseCall(*tensors, 1.0, None, None, None)
    out = {}
    for name in (BF16, "avx512"):
        monkeypatch.setenv(library.ISA_VARIABLE, name)
        out[name] = library.attend_prompt(call)[0]
    monkeypatch.delenv(library.ISA_VARIABLE)
    auto = library.attend_prompt(call)[0]
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    assert [torch.equal(auto, result) for result in out.values()] == [amd, not amd]


def test_auto_takes_the_fastest(path: str, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch(library, "attend_prompt", lambda call: call.query.dtype)
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        for dtype in (fp32, bf16, fp16):
            tensors = attention_inputs(LIBRARY, queries=40, dtype=dtype)
            prompt_attention(*tensors, scale=1.0, causal_offset=0)
    expected = [fp32, bf16, fp16, fp32, fp16]
    assert calls == expected
    # Where a backend was named, that one is meant.
    with prefer("naive"):
        assert not package.compiled(tensors[0])
        prompt_attention(*tensors, scale=1.0, causal_offset=0)
    assert calls == expected
