"""``hf-kvret bench decode --weights``: which weights a model gets, what they weigh, mistakes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from hf_kvret.lab.bench.passes import Decode
from hf_kvret.lab.bench.shapes import load_shape, random_model, weight_bytes
from hf_kvret.lab.bench.weights import check_weights_of, quantize
from hf_kvret.lab.report.results import Results

QUICK = ["--context", "128", "--steps", "3", "--warmup", "1", "--rounds", "1"]
FLAT = "flat:dense_below=0:recent=32:flush=32"
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="no torchao: extra test")


def tiny(**sizes: Any) -> PreTrainedConfig:
    config = copy.deepcopy(load_shape("tiny").config)
    config.update(sizes)
    return config


def inner_bytes(tensor: Any) -> int:
    """Of the tensors that a subclass is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    return sum(inner_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


@needs_torchao
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_bytes_are_those_of_codes_and_scales(tied: bool, weights: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        config = tiny(tie_word_embeddings=tied)
        model = quantize(random_model(config, dtype, "cpu", seed=0), weights)
        parameters = dict(model.named_parameters())
        size = weight_bytes(config, dtype, weights)
        assert size.held == sum(map(inner_bytes, parameters.values()))
        # A tied head has codes of its own, so a step reads single rows of the embedding.
        embedding = parameters["model.embed_tokens.weight"]
        assert type(embedding) is torch.nn.Parameter
        assert size.read == size.held - embedding.nbytes
        coded = {name for name, one in parameters.items() if inner_bytes(one) != one.nbytes}
        assert len(coded) == 2 * 7 + 1 and "lm_head.weight" in coded


@needs_torchao
def test_weights_of_several_types_take_turns(
    measure: Callable[..., Results], tmp_path: Path
) -> None:
    table = tmp_path / "d.md"
    given = ["--dtype", "bfloat16", "--weights", "bf16,int4", "--caches", f"static,{FLAT}"]
    results = measure("decode", *QUICK, *given, "--table", str(table))
    rows = {(cell["cache"], cell["weights"]): row for cell, row in results}
    assert len(rows) == 4 and results.setup["torchao"]
    assert all(row["check"].startswith("equal within") for row in rows.values())
    for cache in ("static", FLAT):
        floors = [rows[cache, name]["floor_device_bytes"] for name in ("bf16", "int4")]
        sizes = [weight_bytes(tiny(), torch.bfloat16, name).read for name in ("bf16", "int4")]
        assert floors[0] - floors[1] == sizes[0] - sizes[1] > 0
    assert "| static, int4 weights " in table.read_text()
    picture = tmp_path / "d.png"
    Decode.plot(picture, results)
    assert picture.stat().st_size > 1000


def test_without_the_option_nothing_says_weights(measure: Callable[..., Results]) -> None:
    results = measure("decode", *QUICK, "--caches", "dense")
    ((cell, _),) = results
    assert "weights" not in cell and "torchao" not in results.setup


@needs_torchao
def test_sizes_that_4_bits_do_not_divide_are_refused(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    for sizes, words in (
        ({"intermediate_size": 96}, "mlp.down_proj has 96 inputs and 256 outputs"),
        ({"vocab_size": 1000}, "lm_head has 256 inputs and 1000 outputs"),
    ):
        tiny(**sizes).save_pretrained(tmp_path)
        given = [*QUICK, "--caches", "dense", "--shape", str(tmp_path)]
        said = refused("decode", *given, "--weights", "int4")
        assert words in said and "give int8 or another --shape" in said


def test_mistakes_are_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [*QUICK[:-2], "--caches", "dense"]
    for arguments, words in (
        (["decode", "--weights", "bf16"], "--dtype is float32: give --dtype bfloat16"),
        (["decode", "--weights", "int3"], "choose among bf16, int8, int4"),
        (["memory", "--weights", "int8"], "unrecognized arguments: --weights"),
        (["prefill", "--weights", "int8"], "unrecognized arguments: --weights"),
    ):
        assert words in refused(*arguments, *quick)
    with pytest.raises(ValueError, match="on a CPU, and the model is on 'cuda': give --device cpu"):
        check_weights_of(tiny(), "int8", torch.float32, torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setitem(sys.modules, "torchao.prototype.quantization.int4", None)
    for weights in ("int8", "int4"):
        said = refused("decode", *quick, "--weights", weights)
        assert f"--weights {weights} needs torchao" in said and "pip install -U torchao" in said
