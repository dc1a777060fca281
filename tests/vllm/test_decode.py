"""A step over pages of another engine gives what our own cache gives with the same options."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache, ParisKVCache
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.index import Scoring
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.testing import MODELS
from hf_kvret.vllm import VARIABLE, register, selection_of
from hf_kvret.vllm.decode import Selector, Sequence, Sequences, cold_end, decode
from hf_kvret_cli import vllm_plugin
from hf_kvret_kernels._dispatch import interpreted, prefer

from ..simulated_gpu.device import simulated

BLOCK_LEN, DIM, HEADS, QUERY_HEADS = 16, 16, 2, 4
WINDOW = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 1}
LENGTHS = [50, 31, 70]
SCALE = DIM**-0.5


# The first pass gets these, and nobody looks at what it gives.
NOTHING = torch.zeros(1, QUERY_HEADS, 1, DIM)
CALL = AttentionCall(Scoring(None, SCALE), lambda: NOTHING)


class Engine:
    """Pages of some requests with random rows, whose blocks lie anywhere."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.sequences = Sequences(BLOCK_LEN, most=8)
        self.lengths = lengths
        self.rows = torch.randn(len(lengths), HEADS, 200, 2 * DIM, generator=generator).to(dtype)
        self.queries = torch.randn(len(lengths), QUERY_HEADS, DIM, generator=generator).to(dtype)
        order = torch.randperm(64, generator=generator)
        self.table = order[: 16 * len(lengths)].view(len(lengths), 16).int()
        self.pages = torch.full((64, HEADS, BLOCK_LEN, 2 * DIM), torch.nan, dtype=dtype)
        for number, length in enumerate(lengths):
            self.write(number, 0, length)

    def write(self, number: int, start: int, end: int) -> None:
        tokens = torch.arange(start, end, device=self.table.device)
        blocks = self.table[number, tokens // BLOCK_LEN].long()
        slots = blocks * BLOCK_LEN + tokens % BLOCK_LEN
        self.sequences.note_writes(slots)
        rows = self.rows[number, :, start:end].transpose(0, 1)
        self.pages[blocks, :, tokens % BLOCK_LEN] = rows

    def grow(self) -> None:
        """A token more of each request."""
        for number, length in enumerate(self.lengths):
            self.write(number, length, length + 1)
        self.lengths = [length + 1 for length in self.lengths]

    def step(self, selector: Selector) -> torch.Tensor:
        sequences = self.found(selector)
        inputs = self.queries, self.pages, self.table, self.lengths, sequences
        return decode(selector, *inputs)

    def found(self, selector: Selector) -> list[Sequence]:
        """The sequences of its requests."""
        ends = [cold_end(selector.options, length) for length in self.lengths]
        return self.sequences.of_requests(self.table, self.lengths, ends)

    def to(self, device: str) -> Engine:
        """Itself, its tensors on ``device``."""
        for name in ("rows", "queries", "table", "pages"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def own_step(self, method: type[RetrievalCache], options: Any, number: int) -> torch.Tensor:
        """``[Hq, D]`` of our own layer, to which the last token came behind the others."""
        layer = method(MODELS["llama"].config(), options).retrieval_layers[0]
        keys, values = self.rows[number, None].split(DIM, dim=-1)
        end = self.lengths[number]
        for start, stop in ((0, end - 1), (end - 1, end)):
            part = slice(start, stop)
            handle, value = layer.update(keys[:, :, part].contiguous(), values[:, :, part])
            query = self.queries[number, None, :, None].expand(-1, -1, stop - start, -1)
            out = layer.attend(query, handle, value, CALL)
        return out[0, :, 0]


METHODS: dict[str, tuple[type[RetrievalCache], dict[str, Any]]] = {
    "flat": (FlatKVCache, {}),
    "paris": (ParisKVCache, {"center": False}),
}


def selector(name: str, **options: Any) -> Selector:
    method, more = METHODS[name]
    given = {**WINDOW, **more, **options, "rest": None}
    return Selector(method, method.Config.of(None, given, name), "layer", SCALE)


def check_step(engine: Engine, chosen: Selector) -> None:
    """A step of all requests gives what our own cache gives."""
    out = engine.step(chosen)
    for number in range(len(engine.lengths)):
        expected = engine.own_step(chosen.method, chosen.options, number)
        torch.testing.assert_close(out[number], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("backend", ["library", "naive"])
def test_steps_are_those_of_our_own_cache(name: str, backend: str) -> None:
    engine, chosen = Engine(LENGTHS), selector(name, top_k=8)
    with nullcontext() if backend == "library" else prefer(backend):
        check_step(engine, chosen)
        engine.grow()
        check_step(engine, chosen)


def dense(engine: Engine, number: int) -> torch.Tensor:
    keys, values = engine.rows[number, :, : engine.lengths[number]].float().split(DIM, dim=-1)
    queries = engine.queries[number].float().view(HEADS, -1, DIM)
    return ((queries @ keys.mT * SCALE).softmax(-1) @ values).flatten(0, 1)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"top_k": 10**6}, torch.float32),
        ({"top_k": 10**6, "flush": 64}, torch.bfloat16),
        ({"top_k": 8, "dense_below": 10**6}, torch.bfloat16),
    ],
)
def test_a_covering_budget_and_short_requests_are_dense(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    engine, chosen = Engine(LENGTHS, dtype), selector("paris", **options)
    out = engine.step(chosen).float()
    atol = 2e-5 if dtype == torch.float32 else 2e-2
    for number in range(len(LENGTHS)):
        torch.testing.assert_close(out[number], dense(engine, number), atol=atol, rtol=0)


def test_a_small_budget_bites_and_a_soft_cap_counts() -> None:
    engine = Engine(LENGTHS)
    few = engine.step(selector("flat", top_k=1))
    assert (few[0] - dense(engine, 0)).abs().max() > 1e-2
    capped = engine.step(replace(selector("flat", top_k=10**6), softcap=0.5))
    assert (capped[0] - dense(engine, 0)).abs().max() > 1e-2


def test_the_window_moves_at_multiples_of_flush() -> None:
    chosen = selector("paris", flush=8)
    ends = [cold_end(chosen.options, length) for length in (10, 24, 25, 32, 33, 40, 41)]
    assert ends == [0, 0, 8, 8, 16, 16, 24]
    assert cold_end(selector("paris", dense_below=100).options, 100) == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_shared_document_with_a_short_question(name: str) -> None:
    """Its last tokens are in one request's index, and in the other's window."""
    engine, chosen = Engine([86, 66]), selector(name, top_k=8)
    engine.rows[1, :, :64] = engine.rows[0, :, :64]
    engine.step(replace(chosen, layer="another"))
    engine.sequences = Sequences(BLOCK_LEN, most=8)
    shared = 64 // BLOCK_LEN
    engine.table[1, :shared] = engine.table[0, :shared]
    engine.write(0, 0, 86)
    engine.write(1, 64, 66)
    lengths, engine.lengths = engine.lengths, engine.lengths[:1]
    ends = [cold_end(chosen.options, length) for length in lengths]
    sequences = engine.sequences.of_requests(engine.table[:1], lengths[:1], ends[:1])
    decode(chosen, engine.queries[:1], engine.pages, engine.table[:1], lengths[:1], sequences)
    engine.lengths = lengths
    check_step(engine, chosen)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lrqk", "select by flat or paris"),
        ("paris:store=host", "store is of a cache of our own"),
        ("paris:top_q=3", "did you mean 'top_k'"),
        ("paris:center=true", "leave center out"),
    ],
)
def test_what_vllm_is_not_told_to_do(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        selection_of(text)
    monkeypatch.setenv(VARIABLE, text)
    for call in (register, vllm_plugin.register):
        with pytest.raises(ValueError, match=words):
            call()


def test_a_selection_codes_keys_as_they_are_and_none_is_made_without_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, options = selection_of("paris:top_k=64")
    assert method is ParisKVCache
    assert options.top_k == 64 and not options.center  # type: ignore[attr-defined]
    assert vllm_plugin.VARIABLE == VARIABLE
    monkeypatch.delenv(VARIABLE, raising=False)
    vllm_plugin.register()


@pytest.mark.skipif(not interpreted(), reason="a simulated GPU interprets kernels")
@pytest.mark.parametrize("name", METHODS)
def test_a_step_on_a_gpu_waits_for_nothing_but_its_blocks(name: str) -> None:
    """On a simulated one: kernels read the pages in place, and the host asks once for the table."""
    pytest.importorskip("triton")
    chosen = selector(name, top_k=8)
    lengths = LENGTHS[:2]
    on_cpu = Engine(lengths)
    expected = [on_cpu.step(chosen), (on_cpu.grow(), on_cpu.step(chosen))[1]]
    with simulated() as gpu:
        engine = Engine(lengths).to("cuda")
        for number, each in enumerate(expected):
            if number:
                engine.grow()
            gpu.phase = "blocks"
            sequences = engine.found(chosen)
            # An index copies its signs to the device once.
            gpu.phase = "decode" if number else "first"
            inputs = engine.queries, engine.pages, engine.table, engine.lengths, sequences
            out = decode(chosen, *inputs)
            gpu.phase = "check"
            torch.testing.assert_close(out.cpu(), each, atol=2e-5, rtol=0)
        assert not gpu.findings
        assert not gpu.waits_in("decode")
