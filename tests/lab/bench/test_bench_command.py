"""``hf-kvret bench`` end to end on a CPU: rows, scaling, memory that runs out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import cache_utils

from hf_kvret.lab.bench import limits
from hf_kvret.lab.bench.checks import Checker
from hf_kvret.lab.bench.opponents import PreallocatedCache, choose_bench_caches
from hf_kvret.lab.bench.passes import Decode
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.report.results import Results

SMALL = "dense_below=0:recent=64:flush=64"
ALL = f"full,dense,static,flat:{SMALL},paris:{SMALL}:store=host"
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")
QUICK = ["--context", "256", "--steps", "3", "--warmup", "1"]


Watch = Callable[..., list[tuple[str, int]]]
Rows = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def rows_of(measure: Callable[..., Results]) -> Rows:
    """Rows of a run by the values of their cells, joined by blanks."""

    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        return {" ".join(map(str, cell.values())): row for cell, row in measure(*arguments)}

    return run


def test_decode_measures_every_cache(
    rows_of: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "d.png"
    arguments = ["--caches", ALL, "--batch", "1,2", "--rounds", "2", "--fill", "random"]
    rows = rows_of("decode", "--context", "512", *QUICK[2:], *arguments, "--plot", str(picture))
    assert len(rows) == 10
    for row in rows.values():
        assert row["timed"] == 6 and row["fill"] == "random" and "scaled" not in row
        low, high = row["seconds_quartiles"]
        assert 0 < low <= row["seconds"] <= high
        assert row["time_over_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert row["full_bytes"] in (2 * 2 * 2 * 256 * 516, 2 * 2 * 2 * 2 * 256 * 516)
    assert rows["dense 512 2"]["check"].startswith("equal within")
    flat, paris = rows[f"flat:{SMALL} 512 1"], rows[f"paris:{SMALL}:store=host 512 1"]
    # 256 rows in two layers with two KV heads.
    assert flat["selected_rows"] == paris["selected_rows"] == 4 * 256
    assert paris["host_bytes"] > 0 and paris["floor_host_bytes"] == 4 * 256 * 512
    assert rows["full 512 2"]["tokens_per_second"] == pytest.approx(
        2 / rows["full 512 2"]["seconds"]
    )
    assert capsys.readouterr().out.count("\n| ") == 1 + 10 + 1
    assert picture.stat().st_size > 1000


@pytest.mark.skipif(not HAS_FP8, reason="transformers before 5.23 has no fp8 cache")
@pytest.mark.parametrize("fill", ["prefill", "random"])
def test_quantized_opponents_are_measured(fill: str, rows_of: Rows) -> None:
    arguments = ["--caches", "quantized:backend=fp8", "--rounds", "1", "--fill", fill]
    row = rows_of("decode", *QUICK, *arguments)["quantized:backend=fp8 256 1"]
    assert row["check"].startswith("finite") and row["device_bytes"] < row["full_bytes"] // 2


def test_flushes_within_the_timed_steps_are_counted(rows_of: Rows) -> None:
    caches = "flat:dense_below=0:recent=16:flush=4"
    arguments = ["--context", "128", "--steps", "12", "--warmup", "0", "--rounds", "1"]
    (row,) = rows_of("decode", *arguments, "--caches", caches).values()
    # In each of two layers steps 5 and 9 move four tokens.
    assert row["flushed_tokens"] == 2 * 2 * 4


def test_prefill_measures_the_first_token(rows_of: Rows) -> None:
    arguments = ["--context", "256,512", "--caches", f"full,paris:{SMALL}", "--rounds", "2"]
    rows = rows_of("prefill", *arguments)
    assert len(rows) == 4
    for row in rows.values():
        assert row["timed"] == 2 and row["fill"] == "prefill" and row["seconds"] > 0
    # Twice the tokens are twice the bytes of a cache that holds nothing else.
    assert rows["full 512 1"]["device_bytes"] == 2 * rows["full 256 1"]["device_bytes"]


def test_fewer_layers_are_measured_and_scaled_apart(
    measure: Callable[..., Results], six_layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["decode", *QUICK, "--shape", str(six_layers), "--caches", "dense"]
    results = measure(*arguments, "--layers", "4")
    ((_, row),) = results
    scaled = row["scaled"]
    assert (row["layers"], row["of_layers"], scaled["from_layers"]) == (4, 6, [2, 4])
    # Bytes do lie on a line: a layer of the cache, a layer of weights.
    assert scaled["device_bytes"] == pytest.approx(row["device_bytes"] * 6 / 4)
    capsys.readouterr()
    ((_, measured),) = measure(*arguments)
    assert scaled["floor_device_bytes"] == pytest.approx(measured["floor_device_bytes"])
    assert "scaled" not in measured and "scaled" not in capsys.readouterr().out
    if scaled["seconds"] is not None:
        line = scaled["seconds_per_layer"] * 6 + scaled["seconds_rest"]
        assert scaled["seconds"] == pytest.approx(line)
    text = Decode.table(results)
    assert "4 of 6 layers" in text and "scaled ms a step" in text


def test_a_need_beyond_the_memory_is_a_row_and_allocates_nothing(
    rows_of: Rows, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = watch(Decode)
    # A sequence takes 0.5 MB.
    monkeypatch.setattr(limits, "available_host_memory", lambda: 20_000_000)
    rows = rows_of("decode", *QUICK, "--caches", "full", "--batch", "1,64", "--rounds", "1")
    assert turns == [("full", 1)]
    assert "out of memory (predicted" in rows["full 256 64"]["out_of_memory"]


def test_memory_that_runs_out_is_a_row_and_the_others_go_on(
    rows_of: Rows, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(turn: Any) -> None:
        if turn.choice.name == "full":
            raise torch.OutOfMemoryError("CUDA out of memory")

    watch(Decode, fail)
    rows = rows_of("decode", "--context", "128", "--caches", "full,dense", "--rounds", "1")
    assert (
        "CUDA out of memory" in rows["full 128 1"]["out_of_memory"]
        and rows["dense 128 1"]["seconds"] > 0
    )
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--caches", "nothing"], "unknown cache 'nothing'.*dense-graph"),
        (["--caches", "dense-graph"], "CUDA graphs need a CUDA device"),
        (["--shape", "gpt-17"], "neither a known shape"),
        (["--layers", "3"], "1 to 2 to build"),
        (["--layers", "1"], "scaling takes two runs"),
        (["--context", "1K", "--caches", "flat"], "flat attends to everything below 2000"),
        (["--shape", "llama-3.1-70b", "--dtype", "float32", "--caches", "full"], "weights take"),
        (
            ["--shape", "SIX_LAYERS", "--layers", "4", "--caches", f"flat:{SMALL}:store=auto"],
            "store=auto decides by the number of layers",
        ),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], message: str, bench: Callable[..., int], six_layers: Path
) -> None:
    words = [word.replace("SIX_LAYERS", str(six_layers)) for word in arguments]
    with pytest.raises(ValueError, match=message):
        bench("decode", *words)


def test_all_caches_take_turns_in_every_round(bench: Callable[..., int], watch: Watch) -> None:
    turns = watch(Decode)
    assert bench("decode", "--context", "64", "--caches", "full,dense", "--rounds", "3") == 0
    assert turns == [("full", 1), ("dense", 1)] * 3


def test_a_preallocated_cache_is_rewound_and_hybrids_refuse() -> None:
    cache = PreallocatedCache(load_shape("tiny").config, 8)
    rows = torch.randn(1, 2, 6, 64)
    for number in range(2):
        keys, values = cache.update(rows, -rows, number)
        assert torch.equal(keys, rows) and torch.equal(values, -rows)
    cache.rewind(2)
    keys, _ = cache.update(rows[:, :, :1], rows[:, :, :1], 0)
    assert torch.equal(keys, rows[:, :, [0, 1, 0]]) and cache.get_seq_length(0) == 3
    sliding = load_shape("mistral-7b-v0.3").config
    sliding.sliding_window = 4
    with pytest.raises(ValueError, match="only layers of full attention"):
        PreallocatedCache(sliding, 8).rewind(0)


@pytest.mark.gpu
def test_a_captured_step_gives_the_logits_of_an_eager_one() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = random_model(load_shape("tiny").config, torch.bfloat16, "cuda", seed=0)
    choice = choose_bench_caches(["dense-graph"], {}, "cuda")["dense-graph"]
    assert Checker(model, None, seed=0).check(choice, 512, 2, "prefill").startswith("equal within")
