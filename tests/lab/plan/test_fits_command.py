"""``hf-kvret fits`` says what fits, in a table and as JSON, and names the remedy where it can't."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_kvret.cli import main
from hf_kvret.lab.bench.shapes import weight_bytes
from hf_kvret.lab.plan import command

Report = Callable[[str], dict[str, Any]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """The JSON of ``hf-kvret fits`` with these words."""

    def run(words: str) -> dict[str, Any]:
        assert main(["fits", *words.split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def row(result: dict[str, Any], cache: str, context: int) -> dict[str, Any]:
    (only,) = (one for one in result["rows"] if (one["cache"], one["context"]) == (cache, context))
    return only


@pytest.mark.parametrize(
    ("cache", "device", "host"),
    [("full", 40, 100), ("flat:store=host", 40, 100), ("flat:store=host", 1000, 20)],
)
def test_the_largest_context_fits_and_no_more(
    cache: str, device: int, host: int, report: Report
) -> None:
    memory = f"--device-memory {device}MB --host-memory {host}MB --reserve 1MB"
    words = f"tiny --caches {cache} {memory} --context"
    context = report(f"{words} 4K")["rows"][0]["largest_context"]
    # A page and a buffer's step are small beside a twentieth.
    most, more = report(f"{words} {context},{context * 21 // 20}")["rows"]
    assert most["fits"] and not more["fits"]
    assert most["device_bytes"] < device * 10**6 and most["host_bytes"] <= host * 10**6


def test_full_attention_is_counted_to_the_byte(report: Report) -> None:
    memory = "--device-memory 1GB --host-memory 1GB"
    result = report(f"tiny --caches full --context 4K {memory}")
    full = row(result, "full", 4096)
    # Two layers of two KV heads of 64, keys and values, bfloat16; a token is decoded, too.
    cache = 4097 * 2 * 2 * 64 * 2 * 2
    assert full["device_bytes"] == cache
    weights = result["weights"]
    assert full["read_bytes"] == weights["read"] + weights["row"] + cache
    assert full["floor_seconds"] == pytest.approx(full["read_bytes"] / 1e12)


def test_rows_on_the_host_cross_the_bus(report: Report) -> None:
    memory = "--device-memory 1GB --host-memory 1GB"
    words = f"tiny --caches flat --context 4K {memory} --bus-bandwidth"
    slow, quick = (report(f"{words} {speed}") for speed in ("1MB", "10MB"))
    near, far = "flat:store=device", "flat:store=host"
    assert row(slow, near, 4096)["floor_seconds"] == row(quick, near, 4096)["floor_seconds"]
    # 1,024 selected rows of two layers, two heads, keys and values, 2 bytes a number.
    bus = 1024 * 2 * 2 * 2 * 64 * 2
    assert row(slow, far, 4096)["bytes"]["read_bus"] == bus
    gain = row(slow, far, 4096)["floor_seconds"] - row(quick, far, 4096)["floor_seconds"]
    assert gain == pytest.approx(bus / 1e6 * 0.9)


@pytest.mark.parametrize(
    ("gpu", "words", "device", "host", "origin"),
    [
        (None, "", 20, None, "what is free on this machine, which has no GPU"),
        (None, "--device-memory 60MB", 60, None, "as given by the options"),
        (None, "--device-memory 60MB --host-memory 1GB", 60, 1000, "as given by the options"),
        (50, "", 50, 20, "what is free on this machine and on this machine's GPU (A GPU)"),
        (50, "--host-memory 1GB", 50, 1000, "and the host as given by the option"),
    ],
)
def test_memory_that_is_not_given_is_what_is_free_here(
    gpu: int | None,
    words: str,
    device: int,
    host: int | None,
    origin: str,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "free_host_bytes", lambda: 20_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1_000_000 * (gpu or 0), 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    result = report(f"tiny --caches flat:store=host --context 16K --reserve 1MB {words}")
    memory = result["machine"]
    megabytes = [size and size // 1_000_000 for size in (memory["device"], memory["host"])]
    assert megabytes == [device, host]
    assert origin in memory["origin"]
    # Without a host all is in one memory.
    assert result["rows"][0]["fits"] == (device >= 60 or host is not None)


def test_the_table_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = "tiny --caches full,latent --context 256K --device-memory 100MB --reserve 1MB"
    assert main(["fits", *words.split(), "--host-memory", "1GB"]) == 0
    text = capsys.readouterr().out
    assert "Memory: as given by the options\n" in text and "262,144 tokens x 1" in text
    line = next(line for line in text.splitlines() if line.startswith("| full"))
    assert line.split("|")[7].strip() == "no"
    assert "latent: llama has no latent attention" in text
    assert "made for 131,072 positions" in text
    assert main(["fits", *words.replace("=1MB", "=1GB").replace("1MB", "1GB").split()]) == 0
    text = capsys.readouterr().out
    assert "Nothing fits beside the weights and 1.00 GB for passes" in text
    assert "positions" not in text


def test_a_mixture_reads_the_experts_of_one_token() -> None:
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    two, eight = (
        weight_bytes(
            AutoConfig.for_model("mixtral", **settings, **heads, num_local_experts=count),
            torch.float32,
        )
        for count in (2, 8)
    )
    expert = 3 * 64 * 96 * 4
    assert eight.held - two.held == 6 * (expert + 64 * 4)
    # The router alone grows.
    assert eight.read - two.read == 6 * 64 * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("no-such-shape --device-memory 1GB", "no-such-shape: neither a known shape"),
        ("tiny --device-memory 1GB --caches offloaded", "offloaded: "),
        ("tiny --device-memory 1GB --caches paris:store=auto", "name a store"),
        ("tiny --device-memory 1GB --caches ,", "name one, as paris"),
        ("tiny --host-memory 1GB", "without --device-memory: this machine has no GPU"),
        ("tiny", "this system doesn't say how much memory is free: give --device-memory"),
    ],
)
def test_mistakes_are_told_in_a_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    monkeypatch.setattr(command, "free_host_bytes", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = program("fits", *words.split(), status=2).err
    assert message in error and error.startswith("hf-kvret: error: ")
