"""``hf-kvret fits`` says what fits, in a table and as JSON, and names the remedy where it can't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_kvret.cli import main
from hf_kvret.lab.bench.shapes import weight_bytes
from hf_kvret.lab.plan import machine
from hf_kvret.lab.program.arguments import DTYPES

TINY = ("tiny", "--caches", "full,flat", "--context", "4K,16K", "--reserve", "1MB")


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["fits", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def row(result: dict[str, Any], cache: str, context: int) -> dict[str, Any]:
    rows = [one for one in result["rows"] if (one["cache"], one["context"]) == (cache, context)]
    assert len(rows) == 1
    return rows[0]


def test_the_largest_context_fits_and_no_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory = ("--device-memory", "40MB", "--host-memory", "100MB")
    result = report(capsys, *TINY, *memory)
    for cache in ("full", "flat:store=host"):
        context = row(result, cache, 16_384)["largest_context"]
        # A page and a buffer's step are small beside a twentieth.
        for length, fits in ((context, True), (context * 21 // 20, False)):
            options = ("--reserve", "1MB", *memory, "--context", f"{length}")
            assert report(capsys, "tiny", "--caches", cache, *options)["rows"][0]["fits"] == fits


def test_full_attention_is_counted_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, *TINY, "--device-memory", "1GB", "--host-memory", "1GB")
    full = row(result, "full", 4096)
    # Two layers of two KV heads of 64, keys and values, bfloat16; a token is decoded, too.
    cache = 4097 * 2 * 2 * 64 * 2 * 2
    assert full["device_bytes"] == cache
    weights = result["weights"]
    assert full["read_bytes"] == weights["read"] + weights["row"] + cache
    assert full["floor_seconds"] == pytest.approx(full["read_bytes"] / 1e12)


def test_without_host_memory_all_is_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    apart = report(capsys, *TINY, "--device-memory", "20MB", "--host-memory", "100MB")
    together = report(capsys, *TINY, "--device-memory", "20MB")
    assert row(apart, "flat:store=host", 16_384)["fits"]
    assert not row(together, "flat:store=host", 16_384)["fits"]


def free_here(monkeypatch: pytest.MonkeyPatch, host: int | None, gpu: int | None = None) -> None:
    """A machine with so many free bytes; None: nobody says, or there is no GPU."""
    monkeypatch.setattr(machine, "free_host_bytes", lambda: host)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gpu, 2 * (gpu or 0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")


def test_without_options_the_memory_is_what_is_free_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_here(monkeypatch, 20_000_000)
    result = report(capsys, *TINY)
    expected = report(capsys, *TINY, "--device-memory", "20MB")
    assert result["rows"] == expected["rows"]
    assert (result["machine"]["device"], result["machine"]["host"]) == (20_000_000, None)
    assert main(["fits", *TINY]) == 0
    assert "Memory: what is free on this machine, which has no GPU\n" in capsys.readouterr().out
    assert main(["fits", *TINY, "--device-memory", "20MB"]) == 0
    assert "Memory: as given by the options\n" in capsys.readouterr().out


def test_a_gpu_of_this_machine_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_here(monkeypatch, 100_000_000, gpu=20_000_000)
    result = report(capsys, *TINY)
    memory = ("--device-memory", "20MB", "--host-memory", "100MB")
    assert result["rows"] == report(capsys, *TINY, *memory)["rows"]
    assert "this machine's GPU (A GPU)" in result["machine"]["origin"]
    host = report(capsys, *TINY, "--host-memory", "1GB")["machine"]
    assert (host["device"], host["host"]) == (20_000_000, 1_000_000_000)
    alone = report(capsys, *TINY, "--device-memory", "20MB")["machine"]
    assert (alone["device"], alone["host"]) == (20_000_000, None)


@pytest.mark.parametrize(
    ("free", "arguments", "message"),
    [
        (10**9, ("--host-memory", "1GB"), "without --device-memory: this machine has no GPU"),
        (None, (), "this system doesn't say how much memory is free: give --device-memory"),
    ],
)
def test_memory_that_nobody_knows_is_asked_for(
    free: int | None,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    free_here(monkeypatch, free)
    assert main(["fits", *TINY, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_on_the_host_cross_the_bus(capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--device-memory", "1GB", "--host-memory", "1GB")
    slow = report(capsys, *TINY, *memory, "--bus-bandwidth", "1MB")
    quick = report(capsys, *TINY, *memory, "--bus-bandwidth", "10MB")
    near, far = "flat:store=device", "flat:store=host"
    assert row(slow, near, 4096)["floor_seconds"] == row(quick, near, 4096)["floor_seconds"]
    # 1,024 selected rows of two layers, two heads, keys and values, 2 bytes a number.
    bus = 1024 * 2 * 2 * 2 * 64 * 2
    assert row(slow, far, 4096)["bytes"]["read_bus"] == bus
    gain = row(slow, far, 4096)["floor_seconds"] - row(quick, far, 4096)["floor_seconds"]
    assert gain == pytest.approx(bus / 1e6 * 0.9)


def test_the_table_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("tiny", "--caches", "full,latent", "--context", "256K", "--device-memory", "100MB")
    assert main(["fits", *options, "--host-memory", "1GB", "--reserve", "1MB"]) == 0
    text = capsys.readouterr().out
    assert "262,144 tokens x 1" in text
    line = next(line for line in text.splitlines() if line.startswith("| full"))
    assert line.split("|")[7].strip() == "no"
    assert "latent: llama has no latent attention" in text
    assert "made for 131,072 positions" in text


def test_a_mixture_reads_the_experts_of_one_token(tmp_path: Path) -> None:
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    sizes = [
        weight_bytes(
            AutoConfig.for_model("mixtral", **settings, **heads, num_local_experts=count),
            DTYPES["float32"],
        )
        for count in (2, 8)
    ]
    expert = 3 * 64 * 96 * 4
    assert sizes[1].held - sizes[0].held == 6 * (expert + 64 * 4)
    # The router alone grows.
    assert sizes[1].read - sizes[0].read == 6 * 64 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-shape", "--device-memory", "1GB"), "MODEL no-such-shape: neither a known shape"),
        (("tiny", "--device-memory", "1GB", "--caches", "offloaded"), "offloaded: "),
        (("tiny", "--device-memory", "1GB", "--caches", "latent"), "choose a method that"),
        (("tiny", "--device-memory", "1GB", "--caches", "paris:store=auto"), "name a store"),
        (("tiny", "--device-memory", "1GB", "--caches", ","), "name one, as paris"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fits", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("hf-kvret: error: ")
