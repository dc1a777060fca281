"""The compiled library on coded rows, on every path: steps, encoding, decoding, refusals."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.higgs import CodedRows, HiggsCodec, host_scores
from hf_kvret_kernels.host_step import (
    Generation,
    GivenIds,
    HostCold,
    HostWindow,
    ListSearch,
    run_step,
)
from hf_kvret_kernels.ids import WrongIdError

from .draws import draw, generator
from .host_steps import FP32_ERROR, expected_attention
from .paged_rows import code_rows

B, H, GROUP, PAGE_LEN, TOKENS = 2, 2, 3, 16, 90

pytestmark = pytest.mark.skipif(bool(library.why_not()), reason="the library is not compiled")


@pytest.fixture(params=library.PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A path of the library, which calls take that name none."""
    if request.param not in library.paths():
        pytest.skip(f"the processor has no {request.param}")
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    return request.param


def coded_rows(
    codec: HiggsCodec, dims: tuple[int, int], *, in_key: bool = False, offset: float = 0.0
) -> tuple[CodedRows, torch.Tensor, torch.Tensor]:
    """Rows on shuffled pages, and the keys and values ``[B, H, n, D]`` that they stand for."""
    columns = -(-TOKENS // PAGE_LEN)
    sides = [draw(B * columns, H, PAGE_LEN, dim, seed=seed) for seed, dim in enumerate(dims)]
    sides = sides[:1] if in_key else sides
    table = torch.randperm(B * columns, generator=generator(4)).int().view(B, columns)
    mean = draw(B, H, dims[0], seed=5) * offset if offset else None
    rows = code_rows(codec, sides, table, value_dim=dims[1], mean=mean)
    near = [codec.decode(*codec.encode(side, "naive"), backend="naive") for side in sides]
    ordered = [x[table.long()].transpose(1, 2).flatten(2, 3)[:, :, :TOKENS] for x in near]
    if mean is not None:
        ordered[0] = ordered[0] + mean[:, :, None]
    return rows, ordered[0], ordered[0][..., : dims[1]] if in_key else ordered[1]


def window_of(
    dims: tuple[int, int], length: int, dtype: torch.dtype, in_key: bool = False
) -> HostWindow:
    keys = draw(B, H, max(1, length), dims[0], seed=8, dtype=dtype)
    values = draw(B, H, max(1, length), dims[1], seed=9, dtype=dtype)
    return HostWindow(keys, keys[..., : dims[1]] if in_key else values, length)


@pytest.mark.factor("bits", [2, 3, 4])
@pytest.mark.factor(
    ("group", "dims"),
    [(8, (24, 16)), (8, (64, 24)), (32, (96, 64)), (64, (64, 64)), (128, (128, 128))],
    ids=str,
)
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.factor("length", [0, 21])
@pytest.mark.factor("softcap", [None, 2.0])
@pytest.mark.factor("offset", [0.0, 3.0])
@pytest.mark.factor("threads", [1, 7])
def test_a_step_reads_what_codes_stand_for(
    path: str,
    bits: int,
    group: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    length: int,
    softcap: float | None,
    offset: float,
    threads: int,
) -> None:
    rows, keys, values = coded_rows(HiggsCodec(bits, group), dims, offset=offset)
    query, window = (
        draw(B, H * GROUP, 1, dims[0], seed=7, dtype=dtype),
        window_of(dims, length, dtype),
    )
    ids = torch.randint(-1, TOKENS, (B, H, 1, 70), generator=generator(6))
    cold = HostCold(rows, GivenIds(ids.int()), torch.ones(B, TOKENS, dtype=torch.bool), 70)
    sinks = draw(H * GROUP, seed=3)
    scale = dims[0] ** -0.5
    out, _ = run_step(
        query, window, cold, scale=scale, softcap=softcap, sink_logits=sinks, threads=threads
    )
    expected = expected_attention(query, keys, values, ids, window, scale, softcap, sinks)
    # Longer sums, and butterflies before and after.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2 * FP32_ERROR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_may_lie_in_their_keys(path: str, dtype: torch.dtype) -> None:
    dims = (48, 32)
    rows, keys, values = coded_rows(HiggsCodec(4, 16), dims, in_key=True)
    query, window = draw(B, 4, 1, 48, seed=7, dtype=dtype), window_of(dims, 5, dtype, in_key=True)
    ids = torch.arange(0, 60, dtype=torch.int32).expand(B, H, 1, -1).contiguous()
    cold = HostCold(rows, GivenIds(ids), torch.ones(B, TOKENS, dtype=torch.bool), 60)
    out, _ = run_step(query, window, cold, scale=0.2)
    expected = expected_attention(query, keys, values, ids, window, 0.2, None, None)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2 * FP32_ERROR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("in_key", [False, True])
def test_scores_of_keys(path: str, in_key: bool, softcap: float | None, dtype: torch.dtype) -> None:
    offset = 0.0 if in_key else 3.0
    rows, keys, _ = coded_rows(HiggsCodec(3, 16), (48, 32), in_key=in_key, offset=offset)
    query = draw(B, H * GROUP, 2, 48, seed=7, dtype=dtype)
    ids = torch.randint(-1, TOKENS, (B, H, 2, 70), generator=generator(6))
    scores = host_scores(query, rows, ids.int(), scale=0.2, softcap=softcap)
    assert scores is not None
    chosen = (
        keys[:, :, None]
        .expand(-1, -1, 2, -1, -1)
        .gather(3, ids.clamp_min(0)[..., None].expand(-1, -1, -1, -1, 48))
    )
    grouped = query.double().unflatten(1, (H, GROUP))
    expected = torch.einsum("bhgqd,bhqkd->bhgqk", grouped, chosen.double()) * 0.2
    if softcap is not None:
        expected = softcap * (expected / softcap).tanh()
    expected = expected.masked_fill((ids < 0)[:, :, None], float("-inf")).flatten(1, 2)
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2 * FP32_ERROR)


def test_lists_score_the_keys_that_codes_stand_for(path: str) -> None:
    """CTkvr's search reads keys of cold rows: coded ones as what they stand for."""
    rows, keys, _ = coded_rows(HiggsCodec(4, 16), (32, 16), offset=2.0)
    centroids, width = 12, 20
    tokens = torch.stack(
        [torch.randperm(TOKENS, generator=generator(i))[:width] for i in range(B * H * centroids)]
    ).view(B, H, centroids, width)
    queries = draw(B, H, centroids, GROUP, 32, seed=2)
    generation = Generation(
        queries,
        1 / queries.norm(dim=-1),
        torch.arange(centroids).expand(B, -1).contiguous(),
        (tokens + 1).to(torch.int16),
        None,
    )
    query, valid = draw(B, H * GROUP, 1, 32, seed=7), torch.ones(B, TOKENS, dtype=torch.bool)
    cold = HostCold(rows, ListSearch((generation,), centroids, 0), valid, 10)
    _, ids = run_step(query, window_of((32, 16), 0, torch.float32), cold, scale=0.2)
    # All lists are recalled: the best of the tokens in any of them, by their exact scores.
    scores = torch.einsum("bhgd,bhnd->bhgn", query.unflatten(1, (H, GROUP))[:, :, :, 0], keys) * 0.2
    listed = torch.zeros(B, H, TOKENS, dtype=torch.bool).scatter_(2, tokens.flatten(2), True)
    scores = scores.masked_fill(~listed[:, :, None], float("-inf"))
    best = scores.log_softmax(-1).amax(2).topk(10, dim=-1).indices
    assert torch.equal(ids[:, :, 0].sort(-1).values.long(), best.sort(-1).values)


def test_ids_of_no_token_are_refused(path: str) -> None:
    rows, *_ = coded_rows(HiggsCodec(2, 16), (32, 16))
    query, window = draw(B, H, 1, 32), window_of((32, 16), 5, torch.float32)
    ids = torch.full((B, H, 1, 3), TOKENS + 6, dtype=torch.int32)
    cold = HostCold(rows, GivenIds(ids), torch.ones(B, TOKENS, dtype=torch.bool), 3)
    with pytest.raises(WrongIdError, match="id 96 of 96 tokens"):
        run_step(query, window, cold, scale=0.2)
    with pytest.raises(WrongIdError, match="id 96 of 96 tokens"):
        host_scores(query, rows, ids, scale=0.2)
