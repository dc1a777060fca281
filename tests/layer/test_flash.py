"""flash-attn takes prompts and exact attention where it fits, and gives what ours gives."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_kvret
from hf_kvret import FlatKVCache
from hf_kvret.attention import attention
from hf_kvret.attention.base import record_base
from hf_kvret.contracts.index import Scoring
from hf_kvret.layer import exact_attention
from hf_kvret.layer.exact_attention import attend_dense
from hf_kvret.testing import COVERING_OPTIONS, MODELS

from . import flash_stand_in

BATCH, HEADS, QUERY_HEADS, DIM = 3, 2, 6, 16
# A mean of values around 1, rounded to bf16 (8 bits).
ROUNDING = 2**-8
INF = float("inf")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """flash-attn is installed, and fits everywhere but for its dims; its calls so far."""

    def fits(query: Any, key: Any, value: Any) -> bool:
        return query.shape[3] == key.shape[3] == value.shape[3] and query.shape[2] > 1

    monkeypatch.setattr(exact_attention, "flash_attn", lambda: flash_stand_in)
    monkeypatch.setattr(exact_attention, "fits", fits)
    monkeypatch.setattr(attention, "fits", fits)
    flash_stand_in.calls.clear()
    yield flash_stand_in.calls


def draw(seed: int, heads: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, heads, count, DIM, generator=generator).bfloat16()


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("offset", [0, 5, None])
def test_it_gives_what_our_own_attention_gives(
    offset: int | None, padded: bool, softcap: float | None, calls: list[str]
) -> None:
    count = 9
    length = count if offset == 0 else 14
    query = draw(1, QUERY_HEADS, count)
    keys, values = (draw(seed, HEADS, length) for seed in (2, 3))
    valid = None
    if padded:
        # Left-padded, with a hole, and empty.
        valid = torch.ones(BATCH, length, dtype=torch.bool)
        valid[0, :4] = valid[1, 5] = valid[2] = False
        keys, values = (
            x.masked_fill(~valid[:, None, :, None], float("nan")) for x in (keys, values)
        )
    scoring = Scoring(valid, 0.3, softcap)
    out, lse = exact_attention.attend_flash(query, keys, values, scoring, offset)
    wanted, wanted_lse = attend_dense(query, keys, values, scoring, offset)
    assert calls == [("varlen" if padded else "dense") + ("" if offset is None else " causal")]
    assert out.shape == wanted.shape and out.dtype == torch.bfloat16
    assert lse.shape == wanted_lse.shape and lse.dtype == torch.float32
    if padded and offset is not None:
        # Queries that are padding get nothing here, and something there.
        asking = valid[:, None, -count:].expand(lse.shape)
        assert (out[~asking] == 0).all() and (lse[~asking] == -INF).all()
        out, lse, wanted, wanted_lse = (x[asking] for x in (out, lse, wanted, wanted_lse))
    elif padded:
        assert (out[2] == 0).all() and (lse[2] == -INF).all()
    assert (out - wanted).abs().max() <= ROUNDING * wanted.abs().max()
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=0)


def _passes(name: str, base: str, padded: bool, dtype: torch.dtype) -> torch.Tensor:
    """Last logits of a prompt, of a second one behind it, and of a step, of weights in bf16."""
    model = MODELS[name].build().bfloat16().to(dtype)
    model.set_attn_implementation(base)
    ids = torch.randint(5, 128, (2, 61), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :11], mask[1, :11] = 0, 0
    cache = FlatKVCache(config=model.config, **COVERING_OPTIONS)
    hf_kvret.attach(model)
    results = []
    with torch.no_grad():
        for start, stop in ((0, 40), (40, 60), (60, 61)):
            given = mask[:, :stop] if padded else None
            out = model(ids[:, start:stop], attention_mask=given, past_key_values=cache)
            results.append(out.logits[:, -1].float())
    return torch.stack(results)


@pytest.mark.parametrize(
    ("name", "base", "padded"),
    [
        ("llama", "sdpa", False),
        ("llama", "eager", True),
        ("gemma2", "eager", True),  # soft cap
        ("gpt_oss", "eager", False),  # learned sinks
    ],
)
def test_prompts_go_through_it_and_steps_do_not(
    name: str, base: str, padded: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = _passes(name, base, padded, torch.bfloat16)
    new = "varlen causal" if padded else "dense causal"
    # Two layers each read the prompt, the second prompt, the window and a chunk of the store. The
    # last two are ragged calls, as sinks are hidden from one of them.
    assert sorted(calls) == sorted(2 * [new, new, "varlen", "varlen"])
    monkeypatch.undo()
    expected = _passes(name, base, padded, torch.float32)
    plain = _passes(name, base, padded, torch.bfloat16)
    assert (results - expected).abs().max() <= 1.5 * (plain - expected).abs().max()


@pytest.mark.parametrize("base", ["flash_attention_2", "flex_attention"])
def test_another_base_keeps_its_prompts(
    base: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own flash attention calls the package itself."""
    names = []
    real = attention.attend_with_base

    def attend(name: str, *args: Any, **kwargs: Any) -> Any:
        names.append(name)
        return real("sdpa", *args, **kwargs)

    monkeypatch.setattr(attention, "attend_with_base", attend)
    monkeypatch.setattr(attention, "base_mask", lambda *_: None)
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    record_base(model.config, base)
    with torch.no_grad():
        model(torch.arange(5, 45)[None], past_key_values=FlatKVCache(config=model.config))
    assert names == [base] * 2 and not calls


def _tensor(dim: int = 64, queries: int = 8, **changes: Any) -> Any:
    tensor = {"shape": (1, 2, queries, dim), "dtype": torch.bfloat16, "is_cuda": True, "device": 0}
    return SimpleNamespace(**{**tensor, **changes})


def test_it_fits_tensors_that_its_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Any] = [flash_stand_in]
    capability = [(8, 0)]
    monkeypatch.setattr(exact_attention, "flash_attn", lambda: installed[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])

    def fits(value_dim: int | None = None, **changes: Any) -> bool:
        one = _tensor(**changes)
        return exact_attention.fits(one, one, one if value_dim is None else _tensor(value_dim))

    assert fits() and fits(dim=256) and fits(dtype=torch.float16)
    assert not fits(dtype=torch.float32) and not fits(dim=264) and not fits(queries=1)
    assert not fits(value_dim=32) and not fits(is_cuda=False)
    capability[0] = (7, 5)
    assert not fits()
    capability[0], installed[0] = (9, 0), None
    assert not fits()


@pytest.mark.parametrize(
    ("content", "version", "logged"),
    [
        ("name = 'it'", "2.8.3", ""),
        ("import no_such_library_", "2.8.3", "no_such_library_"),
        ("name = 'it'", "2.5.9", "2.5.9 is not used: pip install --no-build-isolation"),
    ],
)
def test_the_package_is_found_and_a_broken_or_old_one_is_logged(
    content: str,
    version: str,
    logged: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "flash_attn"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"__version__ = {version!r}", encoding="utf-8")
    (folder / "flash_attn_interface.py").write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    exact_attention.flash_attn.cache_clear()
    package = exact_attention.flash_attn()
    exact_attention.flash_attn.cache_clear()
    assert (package is None) == bool(logged)
    assert logged in caplog.text
