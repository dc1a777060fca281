"""AquaKVCache on models: codes and their chain follow the tokens wherever these go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.methods.aqua import AquaKVCache, AquaStore
from hf_kvret.methods.aqua.coder import Rows
from hf_kvret.methods.aqua.learned import load
from hf_kvret.methods.aqua.plan import LayerPlan, layer_plan
from hf_kvret.methods.aqua.predictors import predict, unpacked
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory, PageMemory
from hf_kvret.testing import COVERING_OPTIONS, MODES
from hf_kvret.testing.scenario import prompt, ragged
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_model_patches.rope import Rope

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}
DEEP = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,
    "rope_parameters": YARN,
}
# A whole row in another place, or turned by another angle, is off by about 2 of its square; codes
# of 4 bits by 0.0077.
FARTHEST = 0.15


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Five layers in a chain, with YaRN's factor."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **DEEP)).eval()
    hf_kvret.attach(made)
    return made


@pytest.fixture(scope="module")
def artifact(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("aqua-deep")
    corpus = Corpus([prompt(1, 200, salt)[0] for salt in range(4)], 0, {"text": "random"})
    calibrate(model, corpus, AquaCalibration(bits=4), folder, progress=False)
    return str(folder)


@torch.no_grad()
def _read(model: PreTrainedModel, cache: AquaKVCache, ids: torch.Tensor, **how: Any) -> Any:
    """Logits ``[B, n, V]`` of more tokens."""
    return model(ids, past_key_values=cache, **how).logits


def _step(model: PreTrainedModel, cache: AquaKVCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of more tokens, one after the other."""
    return torch.cat([_read(model, cache, token) for token in ids.split(1, dim=1)], dim=1)


def _stores(cache: AquaKVCache) -> list[AquaStore]:
    return [layer.regions.store for layer in cache.retrieval_layers]


def _tokens(store: AquaStore) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [(keys, values) for _, keys, values in store.chunks(piece_len=64)]
    return tuple(torch.cat(side, dim=2) for side in zip(*parts, strict=True))


def _reference(stores: list[AquaStore], artifact: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of all layers, decoded densely from the codes, first layer first."""
    found, below, dense = load(artifact, None), None, []
    for store in stores:
        prefix = f"layers.{store.plan.layer}."
        tensors = {n.removeprefix(prefix): x for n, x in found.tensors.items()}
        told = found.options["layers"][str(store.plan.layer)]
        codec = HiggsCodec(store.plan.bits, told["group"], seed=found.options["seed"])
        state, width = store._pages.state_dict(), told["heads"] * told["head_dim"]
        halves = [state[name][:, 0].chunk(2, dim=-1) for name in ("keys", "values")]
        rows = [codec.decode(*half) for half in zip(*halves, strict=True)]
        assert rows[0].shape[2] == width
        for number, side in enumerate(("key", "value")):
            own = {n.removeprefix(f"{side}."): x for n, x in tensors.items()}
            named = {n: x for n, x in unpacked(own).items() if f"{side}.{n}" in tensors}
            if store.plan.previous is not None:
                inputs = below[:1] if side == "key" else [rows[0], below[1]]
                rows[number] = rows[number] + predict(named, torch.cat(inputs, dim=-1))
        below = rows
        rope = Rope(tensors["inv_freq"], told["attention_factor"], told["layout"])
        assert told["attention_factor"] > 1.1
        keys, values = (x.unflatten(2, (told["heads"], -1)).transpose(1, 2) for x in rows)
        where = stores[0]._positions.rows[:, 0, : len(store)]
        dense.append((rope.rotate(keys, where), values))
    return dense


def _assert_as_reference(cache: AquaKVCache, artifact: str) -> None:
    stores = _stores(cache)
    for store, wanted in zip(stores, _reference(stores, artifact), strict=True):
        torch.testing.assert_close(_tokens(store), wanted, rtol=1e-5, atol=1e-5)


class _ShadowStore(AquaStore):
    """Keeps the exact rows too, and compares whenever it is read; with the chain as without."""

    read: ClassVar[list[int]] = []

    def __init__(self, plan: LayerPlan, memory: PageMemory) -> None:
        super().__init__(plan, memory)
        self.exact = PagedStore(DeviceMemory(memory.device))

    def append(self, block: TokenBlock) -> None:
        super().append(block)
        self.exact.append(TokenBlock(block.keys, block.values, block.start))
        left = self.reconstruction
        if left is not None:
            alone = self._decoded_alone()
            torch.testing.assert_close(left.keys, alone.keys, rtol=1e-5, atol=1e-5)

    def chunks(self, *how: Any) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        exact = [
            torch.cat(x, dim=2) for x in zip(*(x[1:] for x in self.exact.chunks()), strict=True)
        ]
        alone = self._attended(self._decoded_alone())
        for start, *found in super().chunks(*how):
            for x, wanted, again in zip(found, exact, alone, strict=True):
                wanted, again = (y[:, :, start : start + x.shape[2]] for y in (wanted, again))
                torch.testing.assert_close(x, again, rtol=1e-5, atol=1e-5)
                missed, size = (y.square().sum((1, 3)) for y in (x - wanted, wanted))
                # Padding may be all zeros.
                assert (missed < FARTHEST * size.clamp(min=float(size.mean()))).all()
            self.read.append(found[0].shape[2])
            yield start, *found

    def reorder(self, rows: torch.Tensor) -> None:
        super().reorder(rows)
        self.exact.reorder(rows)

    def crop(self, cold_len: int) -> None:
        super().crop(cold_len)
        self.exact.crop(cold_len)

    def fork(self) -> Self:
        twin = super().fork()
        twin.exact = self.exact.fork()
        return twin

    def _decoded_alone(self) -> Rows:
        """All tokens, made of codes alone, down the chain, whatever was left."""
        below = self._source_store()
        given = None if below is None else below._decoded_alone()
        return self._decode(self._coder, 0, len(self), given)


class _ShadowCache(AquaKVCache):
    @classmethod
    def make_store(cls, options: Any, layer: int, *how: Any) -> AquaStore:
        made = super().make_store(options, layer, *how)
        return _ShadowStore(layer_plan(options, layer), made.memory)


TELLING = ("greedy_ragged", "beams_ragged", "prompt_lookup", "crop_deep", "prefix_reuse")


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=() if m in TELLING else pytest.mark.slow) for m in MODES]
)
def test_what_is_read_is_near_what_was_stored_in_every_mode_of_use(
    mode: str, model: PreTrainedModel, artifact: str
) -> None:
    """Wrong rows, positions or factors, and a reconstruction that is out of date, all show."""
    _ShadowStore.read.clear()
    options = {**COVERING_OPTIONS, "artifact": artifact, "bits": 4}
    MODES[mode].run(model, lambda: _ShadowCache(model.config, **options))
    assert sum(_ShadowStore.read) > 800


def _small(model: PreTrainedModel, artifact: str, **changes: Any) -> AquaKVCache:
    return AquaKVCache(
        model.config, artifact=artifact, **{**COVERING_OPTIONS, "bits": 4, **changes}
    )


def _padded(model: PreTrainedModel, cache: AquaKVCache) -> None:
    ids, mask = ragged((60, 41))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    _read(model, cache, ids, attention_mask=mask, position_ids=places)
    for step in range(6):
        mask = torch.cat([mask, torch.ones(2, 1).long()], dim=1)
        places = mask.sum(-1, keepdim=True) - 1
        token = prompt(2, 1, salt=step)
        _read(model, cache, token, attention_mask=mask, position_ids=places)


def _pieces(model: PreTrainedModel, cache: AquaKVCache) -> None:
    for part in prompt(1, 130).split(50, dim=1):
        _read(model, cache, part)


def _reordered(model: PreTrainedModel, cache: AquaKVCache) -> None:
    _read(model, cache, prompt(2, 60))
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    _step(model, cache, prompt(3, 14, salt=1))


def _cropped(model: PreTrainedModel, cache: AquaKVCache) -> None:
    _read(model, cache, prompt(1, 60))
    _step(model, cache, prompt(1, 9, salt=1))
    cache.crop(-30)
    _step(model, cache, prompt(1, 9, salt=2))
    cache.crop(-16)
    _read(model, cache, prompt(1, 40, salt=3), position_ids=torch.arange(500, 540)[None])
    _step(model, cache, prompt(1, 3, salt=4))


@pytest.mark.parametrize("fill", [_padded, _pieces, _reordered, _cropped])
@pytest.mark.parametrize("store", ["device", "host"])
def test_reconstructions_are_those_of_the_codes_decoded_layer_by_layer(
    fill: Callable[..., None], store: str, model: PreTrainedModel, artifact: str, tmp_path: Path
) -> None:
    cache = _small(model, artifact, store=store)
    fill(model, cache)
    _assert_as_reference(cache, artifact)
    rows = len(_stores(cache)[0]._pages.state_dict()["keys"])
    token = prompt(rows, 1, salt=9)
    twin = cache.fork()
    cache.save_pretrained(tmp_path)
    loaded = AquaKVCache.from_pretrained(tmp_path, model.config, artifact=artifact)
    for other in (twin, loaded):
        _assert_as_reference(other, artifact)
    answers = [_read(model, each, token) for each in (cache, twin, loaded)]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    _step(model, twin, prompt(rows, 8, salt=10))
    for each in (cache, twin):
        _assert_as_reference(each, artifact)


def test_codes_are_those_of_algorithm_1_in_calibration(
    model: PreTrainedModel, artifact: str
) -> None:
    """A prompt encoded in full, layer by layer, from the keys and values of an exact cache."""
    cache = _small(model, artifact)
    exact = _small(model, artifact, bits=16, first_bits=16)
    for each in (cache, exact):
        _read(model, each, prompt(1, 60))
    found, below = load(artifact, None), None
    for store, other in zip(_stores(cache), _stores(exact), strict=True):
        told = found.options["layers"][str(store.plan.layer)]
        prefix = f"layers.{store.plan.layer}."
        rope = Rope(found.tensors[f"{prefix}inv_freq"], told["attention_factor"], told["layout"])
        keys, values = _tokens(other)
        exact_rows = [rope.unrotate(keys, torch.arange(keys.shape[2])), values]
        rows, codec = [], HiggsCodec(store.plan.bits, told["group"], seed=0)
        for side, x in zip(("key", "value"), exact_rows, strict=True):
            x, predicted = x.transpose(1, 2).flatten(2), torch.zeros(())
            if told["previous"] is not None:
                inputs = below[:1] if side == "key" else [rows[0], below[1]]
                names = (f"{prefix}{side}.weight", f"{prefix}{side}.bias")
                weight, bias = (found.tensors[name].float() for name in names)
                predicted = torch.cat(inputs, dim=-1) @ weight.mT + bias
            coded = codec.encode(x - predicted)
            rows.append(codec.decode(*coded) + predicted)
        below = rows
        keys, values = _tokens(store)
        found_rows = rope.unrotate(keys, torch.arange(keys.shape[2])), values
        for x, wanted in zip(found_rows, rows, strict=True):
            x = x.transpose(1, 2).flatten(2)
            # A pair halfway between two grid points may round either way.
            same = torch.isclose(x, wanted, rtol=0, atol=1e-4).float().mean()
            assert same > 0.98


class _GapCache(AquaKVCache):
    """Its first layer has plain rows, which no layer above can be predicted from."""

    @classmethod
    def make_store(cls, options: Any, layer: int, *how: Any) -> Any:
        made = super().make_store(options, layer, *how)
        return PagedStore(DeviceMemory(made.memory.device)) if layer == 0 else made


def test_a_layer_below_with_another_store_is_refused(model: PreTrainedModel, artifact: str) -> None:
    cache = _GapCache(model.config, **COVERING_OPTIONS, artifact=artifact, bits=4)
    with pytest.raises(RuntimeError, match=r"layer 1 is predicted from layer 0.*a PagedStore"):
        _read(model, cache, prompt(1, 200, 0))
        _read(model, cache, prompt(1, 1, 1))


def test_a_block_without_positions_is_refused_where_keys_are_coded_before_rope(
    model: PreTrainedModel, artifact: str
) -> None:
    cache = _small(model, artifact)
    _read(model, cache, prompt(1, 200, 0))
    store = _stores(cache)[0]
    rows, before = torch.zeros(1, 2, 3, 16), store.nbytes()
    with pytest.raises(ValueError, match=r"block\.positions is None"):
        store.append(TokenBlock(rows, rows, len(store)))
    assert store.nbytes() == before
