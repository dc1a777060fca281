"""AQUA-KV on latent attention: one row predicts the next layer's, and has its value in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import AquaKVCache
from hf_kvret.artifacts.shared import shared_artifact
from hf_kvret.lab.calibrate.aqua import predict
from hf_kvret.testing import LATENT_MODELS
from hf_kvret.testing.scenario import prompt
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_model_patches.rope import Rope

from ..saved.saved_files import read_saved
from .aqua_caches import attached, learn, read, rows_of, stores_of

RANK, ROW, GROUP = 16, 24, 8
SLOW = pytest.mark.slow
REGIONS = {"sink": 0, "recent": 4, "flush": 4, "dense_below": 0}
# Interleaved, in halves, without RoPE; the last has recurrent layers between.
FAMILIES = [
    "deepseek_v3",
    *(pytest.param(name, marks=SLOW) for name in ("deepseek_v2", "kimi_linear")),
]


def learned(name: str, folder: Path, **options: Any) -> PreTrainedModel:
    """A model whose attention is ours, with an artifact in ``folder``."""
    model = LATENT_MODELS[name].build()
    learn(model, folder, **{"sinks": 0} | options)
    return attached(model)


def filled(model: PreTrainedModel, folder: Path, **options: Any) -> AquaKVCache:
    """A cache of two prompts of 60 tokens, 56 of which are cold."""
    cache = AquaKVCache(model.config, artifact=str(folder), **REGIONS, **options)
    read(model, cache, prompt(2, 60))
    return cache


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_predicted_from_rows_below_and_coded_once(name: str, tmp_path: Path) -> None:
    """Algorithm 1 by hand, of the rows of an exact cache."""
    model = learned(name, tmp_path)
    cache, exact = filled(model, tmp_path), filled(model, tmp_path, bits=16, first_bits=16)
    artifact, below = shared_artifact(str(tmp_path), None, "aqua"), torch.zeros(())
    positions, codec = torch.arange(56)[None], HiggsCodec(4, GROUP, seed=0)
    for store, other in zip(stores_of(cache), stores_of(exact), strict=True):
        prefix, plan = f"layers.{store.plan.layer}.", artifact.options["layers"]
        plan = plan[str(store.plan.layer)]
        shape = plan["heads"], plan["head_dim"], plan["value_head_dim"], plan["value_group"]
        assert shape == (1, ROW, 0, None)
        own = {
            n.removeprefix(prefix): x for n, x in artifact.tensors.items() if n.startswith(prefix)
        }
        assert not any(n.startswith("value.") for n in own)
        kind = plan["attention_factor"], plan["layout"], plan.get("last", False)
        rope = Rope(own["inv_freq"], *kind)
        keys, values = rows_of(other)
        assert torch.equal(values, keys[..., :RANK])
        row, predicted = rope.unrotate(keys, positions)[:, 0], torch.zeros(())
        if plan["previous"] is not None:
            key = {n.removeprefix("key."): x for n, x in own.items() if n.startswith("key.")}
            assert key["weight"].shape == (ROW, ROW)
            predicted = predict(key, below)
        below = codec.decode(*codec.encode(row - predicted)) + predicted
        keys, values = rows_of(store)
        assert keys.shape == (2, 1, 56, ROW) and torch.equal(values, keys[..., :RANK])
        # A pair halfway between two grid points may round either way.
        near = rope.unrotate(keys, positions)[:, 0]
        assert torch.isclose(near, below, rtol=0, atol=1e-4).float().mean() > 0.98
        ids = torch.tensor([3, 50, 7], dtype=torch.int32).expand(2, 1, 1, 3)
        gathered = store.gather(ids)
        assert torch.equal(gathered[0][:, :, 0], keys[:, :, [3, 50, 7]])
        assert torch.equal(gathered[1], gathered[0][..., :RANK])


def test_bytes_are_those_of_rows_alone(tmp_path: Path) -> None:
    model = learned("deepseek_v3", tmp_path / "made")
    # 24 numbers of 4 bits, and three scales of fp16; 24 numbers of fp32.
    for options, nbytes in (({}, 12 + 6), ({"bits": 16, "first_bits": 16}, 96)):
        cache = filled(model, tmp_path / "made", **options)
        for store in stores_of(cache):
            rows = store._pages.paged_rows()
            assert store.row_nbytes(96) == rows.width * rows.dtype.itemsize == nbytes
        bits = options.get("bits", 4)
        assert [layer["bits"] for layer in cache.stats()["layers"]] == [bits, bits]
        cache.save_pretrained(tmp_path / "saved")
        saved = read_saved(tmp_path / "saved")[1]
        rows = sum(
            saved[f"layers.1.store.{x}"][0, 0, 0].nbytes
            for x in ("keys", "values")
            if f"layers.1.store.{x}" in saved
        )
        assert rows == nbytes
