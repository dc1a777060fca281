"""``hf-kvret bench decode`` and ``prefill`` on a CPU: rows, fewer layers, full memory."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench import model_measurement, passes
from hf_kvret.lab.bench.checks import Checker
from hf_kvret.lab.bench.filling import Turn
from hf_kvret.lab.bench.opponents import CAPTURED, PreallocatedCache, choose_bench_cache
from hf_kvret.lab.bench.passes import Decode
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.evaluate import measurement
from hf_kvret.lab.report.results import Results
from hf_kvret.testing import MODELS

from .conftest import find_only, nothing

SMALL = "dense_below=0:recent=64:flush=64:top_k=16"
ONCE = ["--context", "256", "--steps", "3", "--warmup", "1", "--rounds", "1"]

Rows = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def rows_of(measure: Callable[..., Results]) -> Rows:
    """Rows of a run by the values of their cells, joined by blanks."""

    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        return {" ".join(map(str, cell.values())): row for cell, row in measure(*arguments)}

    return run


@pytest.fixture
def turns(watch: Any) -> list[Turn]:
    """The turns of decode steps that were measured."""
    return watch(Decode, "once", lambda self, turn: turn)


def test_decode_measures_every_cache_in_every_round(
    rows_of: Rows, turns: list[Turn], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "d.png"
    caches = ["dense", f"paris:{SMALL}:store=host"]
    arguments = ["--caches", ",".join(caches), "--batch", "1,2", "--fill", "random"]
    rows = rows_of("decode", *ONCE, *arguments, "--rounds", "2", "--plot", str(picture))
    assert [(turn.choice.name, turn.batch) for turn in turns] == [
        (cache, batch) for batch in (1, 2) for cache in 2 * caches
    ]
    assert len(rows) == 4
    for row in rows.values():
        assert row["timed"] == 6 and row["fill"] == "random"
        low, high = row["seconds_quartiles"]
        assert 0 < low <= row["seconds"] <= high
        assert row["time_over_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    dense = rows["dense 256 2"]
    assert dense["check"].startswith("equal within")
    # Two layers, two sequences, keys and values, two heads, 260 tokens of 256 bytes.
    assert dense["full_bytes"] == 2 * 2 * 2 * 2 * 260 * 256
    assert dense["tokens_per_second"] == pytest.approx(2 / dense["seconds"])
    paris = rows[f"paris:{SMALL}:store=host 256 1"]
    # 16 rows in two layers with two KV heads.
    assert paris["selected_rows"] == 4 * 16
    assert paris["host_bytes"] > 0 and paris["floor_host_bytes"] == 4 * 16 * 512
    assert capsys.readouterr().out.count("\n| ") == 1 + 4 + 1
    assert picture.stat().st_size > 1000


def test_prefill_reads_prompts_as_generate_does(
    rows_of: Rows, watch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def note(model: Any, cache: Any, tokens: torch.Tensor, start: int) -> int:
        # A pass begins where the cache ends.
        assert cache.get_seq_length() == start
        return tokens.shape[1]

    read = watch(passes, "feed", note)
    expected = watch(RetrievalCache, "expect", lambda self, tokens, chunk: (tokens, chunk))
    caches = ["full", f"flat:{SMALL}", f"flat:{SMALL}:prefill_chunk=200"]
    arguments = ["--context", "256,512", "--steps", "1", "--warmup", "0", "--rounds", "1"]
    rows = rows_of("prefill", *arguments, "--caches", ",".join(caches))
    for row in rows.values():
        assert row["timed"] == 1 and row["fill"] == "prefill" and row["seconds"] > 0
    assert [row["chunk"] for row in rows.values()] == [None, None, 200] * 2
    assert read == [256, 256, 200, 56, 512, 512, 200, 200, 112]
    assert expected == [(256, 256), (256, 200), (512, 512), (512, 200)]
    # Twice the tokens are twice the bytes of a cache that holds nothing else.
    assert rows["full 512 1"]["device_bytes"] == 2 * rows["full 256 1"]["device_bytes"]
    assert "| tokens a pass |" in capsys.readouterr().out


def test_turns_read_what_is_new_where_a_cache_goes_back(
    rows_of: Rows, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_ANSWER", 4)
    monkeypatch.setattr(passes, "_THOUGHT", 3)
    MODELS["lfm2"].build().config.save_pretrained(tmp_path)
    small = f"{SMALL}:max_draft=6"
    caches = f"full,flat:{small},flat:{small}:snapshots=0"
    arguments = ["--shape", str(tmp_path), "--context", "150", "--steps", "2", "--rounds", "1"]
    rows = rows_of("turns", *arguments, "--caches", caches)
    read = [row["tokens_read"] for row in rows.values()]
    # A message of 64 tokens, and the one of an answer that is not thought.
    assert read == [[215, 280], [65, 65], [215, 280]]
    assert all(row["timed"] == 2 for row in rows.values())
    assert "| 215 to 280 " in capsys.readouterr().out


def test_fewer_layers_are_measured_and_said(
    measure: Callable[..., Results], capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, row),) = measure("decode", *ONCE, "--layers", "1", "--caches", "dense")
    assert (row["layers"], row["of_layers"]) == (1, 2)
    # One layer, keys and values, two heads, 260 tokens of 256 bytes.
    assert row["full_bytes"] == 2 * 2 * 260 * 256
    assert "Measured: 1 of 2 layers of tiny" in capsys.readouterr().out


def test_a_need_beyond_the_memory_is_a_row_and_allocates_nothing(
    rows_of: Rows, turns: list[Turn], monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel
) -> None:
    # A sequence takes 0.5 MB.
    monkeypatch.setattr(model_measurement, "available_host_memory", lambda: 20_000_000)
    rows = rows_of("decode", *ONCE, "--caches", "full", "--batch", "1,64")
    assert [turn.batch for turn in turns] == [1]
    assert "out of memory (predicted" in rows["full 256 64"]["out_of_memory"]
    # A GPU says by itself that it is full.
    on_meta = copy.deepcopy(model).to("meta")
    assert model_measurement.shortage(on_meta, choose_bench_cache("paris"), 10**6, 10**6) is None


def finds_nothing(patch: pytest.MonkeyPatch) -> None:
    find_only(nothing, patch)
    patch.setattr(Checker, "check", lambda *arguments: "passed")


def memory_is_full(patch: pytest.MonkeyPatch) -> None:
    once = Decode.once

    def fails(self: Decode, turn: Turn) -> Any:
        if turn.choice.method == "flat":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return once(self, turn)

    patch.setattr(Decode, "once", fails)


@pytest.mark.parametrize(
    ("fault", "entry", "why", "status"),
    [
        (finds_nothing, "check_failed", "retrieved nothing", 1),
        (memory_is_full, "out_of_memory", "CUDA out of memory", 0),
    ],
)
def test_a_cache_that_fails_has_a_row_without_numbers_and_others_go_on(
    fault: Callable[[pytest.MonkeyPatch], None],
    entry: str,
    why: str,
    status: int,
    bench: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    fault(monkeypatch)
    file, flat = tmp_path / "decode.json", f"flat:{SMALL}"
    arguments = [*ONCE, "--caches", f"{flat},dense", "--json", str(file)]
    assert bench("decode", *arguments) == status
    rows = {cell["cache"]: row for cell, row in Results.load(file)}
    assert why in rows[flat][entry] and "seconds" not in rows[flat]
    assert rows["dense"]["seconds"] > 0
    shown = capsys.readouterr()
    assert why in shown.out and (why in shown.err) == (status == 1)


@torch.inference_mode()
def test_steps_that_take_too_long_are_fewer() -> None:
    # No step of this model takes less than a microsecond, so that three are all that is allowed.
    decode = Decode(device="cpu", caches="dense", steps=50, warmup=1, limit=1e-6)
    cell = {"cache": "dense", "context": 64, "batch": 1}
    assert len(decode.once(decode.turn(cell)).seconds) == 3
    assert decode.steps_within(0.0) == 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("decode --caches nothing", "unknown cache 'nothing'.*dense-graph"),
        ("decode --caches dense:x=1", "dense takes no options"),
        ("decode --caches dense-graph", "CUDA graphs need a CUDA device"),
        ("decode --shape gpt-17", "neither a known shape"),
        ("decode --layers 3", "1 to 2 to build"),
        ("decode --context 1K --caches flat", "flat attends to everything below 2000"),
        ("decode --shape llama-3.1-70b --caches full", "weights take"),
        ("prefill --shape tiny --context 512 --caches full,latent", "latent"),
        ("decode --shape FOLDER", "--shape .*: no configuration of a model"),
    ],
)
def test_mistakes_are_refused(words: str, message: str, program: Any, tmp_path: Path) -> None:
    words = words.replace("FOLDER", str(tmp_path))
    out, error = program("bench", *words.split(), "--device", "cpu", status=2)
    assert re.search(message, error.splitlines()[-1]) and not out


def test_a_captured_step_is_no_way_to_read_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "check_device", lambda device: None)
    with pytest.raises(ValueError, match=r"dense-graph is a way to decode.*use dense"):
        passes.Prefill(device="cuda", caches="dense-graph").check()


def test_a_preallocated_cache_is_rewound_and_hybrids_refuse() -> None:
    cache = PreallocatedCache(load_shape("tiny").config, 8)
    rows = torch.randn(1, 2, 6, 64)
    for number in range(2):
        keys, values = cache.update(rows, -rows, number)
        assert torch.equal(keys, rows) and torch.equal(values, -rows)
    cache.rewind(2)
    keys, _ = cache.update(rows[:, :, :1], rows[:, :, :1], 0)
    assert torch.equal(keys, rows[:, :, [0, 1, 0]]) and cache.get_seq_length(0) == 3
    sliding = AutoConfig.for_model("mistral", sliding_window=4, num_hidden_layers=2)
    with pytest.raises(ValueError, match="only layers of full attention"):
        PreallocatedCache(sliding, 8).rewind(0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_gives_the_logits_of_an_eager_one(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = random_model(load_shape("tiny").config, torch.bfloat16, "cuda", seed=0)
    choice = choose_bench_cache(name, device="cuda")
    assert Checker(model, None, seed=0).check(choice, 512, 2, "prefill").startswith("equal within")
