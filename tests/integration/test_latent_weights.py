"""Latent attention where ``kv_b_proj`` is no plain weight: its matrix is always the current one."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

import hf_kvret
from hf_kvret import FlatKVCache, LatentKVCache
from hf_kvret.integration import projection
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, LOGIT_TOLERANCE
from hf_kvret.testing.scenario import prompt

STEPS = 6
Change = Callable[[PreTrainedModel], object]


class Adapter(nn.Module):
    """As PEFT's: low-rank parts beside the layer that it wraps, of which some are active."""

    def __init__(self, base: nn.Module, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base, self.active, self.scaling = base, ["a"], {"a": 0.5, "b": 1.5}
        self.dropout = nn.Dropout(0.5)
        for name, shape in {"down": (4, 16), "up": (base.out_features, 4)}.items():
            for part in self.scaling:
                weight = torch.randn(shape, generator=generator) / 4
                setattr(self, f"{name}_{part}", nn.Parameter(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        for part in self.active:
            low = self.dropout(x) @ getattr(self, f"down_{part}").T
            out = out + self.scaling[part] * low @ getattr(self, f"up_{part}").T
        return out


@pytest.fixture
def model() -> PreTrainedModel:
    """Attached, so that ``model(...)`` takes any cache."""
    built = LATENT_MODELS["deepseek_v3"].build()
    hf_kvret.attach(built)
    return built


@pytest.fixture
def adapted(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """With an adapter whose class counts as known."""
    monkeypatch.setattr(projection, "_KNOWN_MODULES", (*projection._KNOWN_MODULES, __name__))
    return replaced(model, Adapter)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The projections that were asked for their matrix, in order."""
    modules: list[nn.Module] = []
    images = projection._images

    def noted(module: nn.Module, *args: Any) -> projection.Affine:
        modules.append(module)
        return images(module, *args)

    monkeypatch.setattr(projection, "_images", noted)
    return modules


def replaced(model: PreTrainedModel, make: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = make(layer.self_attn.kv_b_proj)
    return model.eval()


def projections(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn.kv_b_proj for layer in model.model.layers]


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Cache, changes: dict[int, Change]) -> torch.Tensor:
    """``[STEPS + 1, V]`` after a prompt and after each of the same tokens, ``changes`` between."""
    ids, rows = prompt(1, 60 + STEPS), []
    rows.append(model(ids[:, :60], past_key_values=cache).logits[0, -1])
    for step in range(STEPS):
        changes.get(step, lambda model: None)(model)
        rows.append(model(ids[:, 60 + step, None], past_key_values=cache).logits[0, -1])
    return torch.stack(rows)


def check(
    model: PreTrainedModel, changes: dict[int, Change] | None = None, tolerance: float = 0.0
) -> None:
    """As transformers' own cache, for a method that selects and for one that reads all."""
    changes, stock = changes or {}, copy.deepcopy(model)
    expected = logits(stock, DynamicCache(config=stock.config), changes)
    for make in (lambda own: FlatKVCache(own.config, **COVERING_OPTIONS), _latent):
        own = copy.deepcopy(model)
        cache = make(own)
        result = logits(own, cache, changes)
        worst = (result - expected).abs().max().item()
        assert worst < LOGIT_TOLERANCE + tolerance, type(cache).__name__


def _latent(model: PreTrainedModel) -> Cache:
    return LatentKVCache(model.config)


def in_all(change: Callable[[Any], object]) -> Change:
    def changed(model: PreTrainedModel) -> None:
        for one in projections(model):
            change(one)

    return changed


def optimize(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.05).step()
    module.zero_grad()


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: 1.5 * out)


def other_forward(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: 0.5 * plain(x)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Any], object]] = {
    "data": lambda module: module.base.weight.data.mul_(2),
    "signs": lambda module: module.up_a.data.neg_(),
    "one number": lambda module: module.base.weight.data[3, 5].add_(1.0),
    "optimizer": optimize,
    "other parameter": lambda module: setattr(module, "up_a", nn.Parameter(module.up_b.data * 2)),
    "loaded": lambda module: module.load_state_dict(Adapter(module.base, seed=1).state_dict()),
    "scaling": lambda module: module.scaling.update(a=2.0),
    "active": lambda module: setattr(module, "active", ["b", "a"]),
    "off": lambda module: module.active.clear(),
    "child": lambda module: setattr(module, "base", nn.Linear(16, module.base.out_features, False)),
    "hook": hook,
    "hook of a child": lambda module: hook(module.base),
    "forward": other_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_seen(
    change: str, adapted: PreTrainedModel, calls: list[nn.Module]
) -> None:
    def seeded(module: Any) -> None:
        torch.manual_seed(0)
        CHANGES[change](module)

    expected = logits(copy.deepcopy(adapted), DynamicCache(config=adapted.config), {})
    changes = {3: in_all(seeded)}
    other = logits(copy.deepcopy(adapted), DynamicCache(config=adapted.config), changes)
    assert torch.equal(expected[:4], other[:4]) and (other[4:] - expected[4:]).abs().max() > 0.05
    assert not calls
    check(adapted, changes)
    # Two caches and two layers; with a hook at each of the three steps, else once more.
    unknown = "hook" in change or change == "forward"
    child_trains = change == "child"
    assert len(calls) == 4 * (1 + (3 if unknown or child_trains else 1))


def test_a_change_and_back_is_seen_twice(adapted: PreTrainedModel) -> None:
    off = in_all(lambda module: setattr(module, "active", []))
    on = in_all(lambda module: setattr(module, "active", ["a"]))
    check(adapted, {1: off, 3: on, 4: off})


@torch.no_grad()
def test_what_stays_is_made_once(adapted: PreTrainedModel, calls: list[nn.Module]) -> None:
    for _ in range(2):
        logits(adapted, LatentKVCache(adapted.config), {})
    assert calls == projections(adapted)
    # Nor does it hold more than itself.
    for entry in (projection._kept[one][1] for one in calls):
        assert entry.offset is not None and entry.offset.untyped_storage().nbytes() == 128 * 4
        assert entry.matrix.untyped_storage().nbytes() == 128 * 16 * 4


def affine(module: nn.Module, dtype: torch.dtype = torch.float32) -> projection.Affine:
    return projection.affine(module, torch.zeros(1, dtype=dtype), 16)


@torch.no_grad()
def test_modes_of_torch_make_it_anew(adapted: PreTrainedModel) -> None:
    module = projections(adapted)[0]
    first = affine(module)
    assert affine(module) is first
    with torch.autocast("cpu", torch.bfloat16):
        assert affine(module).matrix.dtype == torch.bfloat16
    with torch.inference_mode():
        assert affine(module).matrix.is_inference()
    assert not affine(module).matrix.is_inference()
    module.up_b.fill_(torch.nan)
    assert affine(module) is affine(module)
    with torch.enable_grad():
        result = affine(module)
        assert result.matrix.requires_grad and affine(module) is not result
        module.requires_grad_(False)
        assert affine(module) is affine(module)
        module.requires_grad_(True)
        assert affine(module).matrix.requires_grad
    module.double()
    assert affine(module, torch.float64).matrix.dtype == torch.float64


def training(module: Adapter) -> None:
    module.dropout.train()


def on_meta(module: Adapter) -> None:
    """Not used now, and not to be compared."""
    module.up_b = nn.Parameter(module.up_b.to("meta"))


def with_an_object(module: Any) -> None:
    module.active = {"a"}


def with_kept_images(module: Any) -> None:
    module.compile(backend="eager")


@pytest.mark.parametrize(
    "change", [training, hook, other_forward, on_meta, with_an_object, with_kept_images]
)
@torch.no_grad()
def test_nothing_is_kept_where_not_all_is_known(
    change: Callable[[Any], None], adapted: PreTrainedModel, calls: list[nn.Module]
) -> None:
    module = projections(adapted)[0]
    change(module)
    assert affine(module) is not affine(module)
    assert calls == [module] * 2 and module not in projection._kept


@torch.no_grad()
def test_nothing_is_kept_of_an_unknown_class(
    model: PreTrainedModel, calls: list[nn.Module]
) -> None:
    logits(replaced(model, Adapter), LatentKVCache(model.config), {})
    assert calls == projections(model) * STEPS and not set(calls) & set(projection._kept)


@torch.no_grad()
def test_hooks_of_all_modules_count(model: PreTrainedModel) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if type(module) is nn.Linear else None
    )
    try:
        matrix = affine(projections(model)[0]).matrix
    finally:
        handle.remove()
    torch.testing.assert_close(matrix, 2 * affine(projections(model)[0]).matrix)


@torch.no_grad()
def test_it_dies_with_its_module_and_copies_have_their_own(adapted: PreTrainedModel) -> None:
    module = projections(adapted)[0]
    first, twin = affine(module), copy.deepcopy(module)
    twin.base.weight.mul_(2)
    assert affine(module) is first and not torch.equal(affine(twin).matrix, first.matrix)
    gone, matrix = weakref.ref(twin), weakref.ref(affine(twin))
    del twin
    gc.collect()
    assert gone() is None and matrix() is None
    assert projection._kept[module][1] is first


def test_threads_with_models_of_their_own_and_one_in_common(adapted: PreTrainedModel) -> None:
    expected = logits(adapted, LatentKVCache(adapted.config), {})
    results: list[torch.Tensor] = []

    def run() -> None:
        for own in (adapted, copy.deepcopy(adapted)):
            results.append(logits(own, LatentKVCache(own.config), {}))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(one, expected) for one in results)


def with_bias(linear: nn.Linear) -> nn.Module:
    linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))
    return linear


def test_an_offset_goes_to_values(model: PreTrainedModel, calls: list[nn.Module]) -> None:
    check(replaced(model, with_bias))
    # A linear layer with a bias is read as it is.
    assert not calls


class Subclass(nn.Linear):
    """Of a user's own."""


def subclass(linear: nn.Linear) -> nn.Module:
    twin = Subclass(linear.in_features, linear.out_features)
    twin.load_state_dict(linear.state_dict())
    return twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrap", [nn.Sequential, subclass, lambda linear: linear])
@torch.no_grad()
def test_a_bias_takes_no_precision_of_the_matrix(
    wrap: Callable[[Any], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 128)
    linear.weight.mul_(0.5)
    # Tens of times as large as the weights.
    linear.bias.normal_(0, 2)
    module = wrap(linear).to(dtype).eval()
    weight, bias = linear.weight.to(dtype).float(), linear.bias.to(dtype)
    result = projection.affine(module, torch.zeros(1, dtype=dtype), 64)
    assert result.matrix.dtype == dtype and torch.equal(result.offset, bias)
    # The last digit of the weight, and of the bias in the last of a sum 64 times as large.
    allowed = torch.finfo(dtype).eps * (weight.abs() + bias.float().abs()[:, None] / 64)
    assert ((result.matrix.float() - weight).abs() <= allowed).all()
    assert torch.equal(result.matrix.float(), weight) is (module is linear)


class FixedRange(nn.Module):
    """As a layer whose inputs are quantized in a range that calibration has fixed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("codes", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-10, 10) @ (self.codes.to(x.dtype) * self.scale).T


@torch.no_grad()
def test_quantized_inputs_stay_in_their_range() -> None:
    linear = nn.Linear(64, 128, bias=False)
    module = FixedRange(linear).eval()
    matrix = projection.affine(module, torch.zeros(1), 64).matrix
    torch.testing.assert_close(matrix, module.codes.float() * module.scale)


class Normalized(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x / x.square().mean(-1, keepdim=True).add(1.0).sqrt())


class Even(Normalized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.abs())


def rectified(linear: nn.Linear) -> nn.Module:
    return nn.Sequential(linear, nn.ReLU())


def rectified_by_a_hook(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda module, args, out: out.relu())
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [rectified, rectified_by_a_hook, Normalized, Even])
@torch.no_grad()
def test_what_is_not_linear_is_refused_with_the_way_out(
    change: Callable[[nn.Linear], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = change(nn.Linear(64, 128)).to(dtype).eval()
    words = rf"kv_b_proj is a {type(module).__name__} that is not linear.*'dynamic'"
    with pytest.raises(ValueError, match=words):
        projection.affine(module, torch.zeros(1, dtype=dtype), 64)


@pytest.mark.parametrize("make", [lambda c: FlatKVCache(c, **COVERING_OPTIONS), LatentKVCache])
def test_a_model_whose_projection_is_not_linear_says_so(
    model: PreTrainedModel, make: Callable[[Any], Cache]
) -> None:
    replaced(model, rectified)
    with pytest.raises(ValueError, match="kv_b_proj is a Sequential that is not linear"):
        logits(model, make(model.config), {})
    logits(model, DynamicCache(config=model.config), {})


class Offloaded(nn.Module):
    """As accelerate's: the weight is there during a call only, between calls it is on meta."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.on_host = linear, linear.weight.data
        linear.weight = nn.Parameter(linear.weight.to("meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        away, self.linear.weight = self.linear.weight, nn.Parameter(self.on_host.to(x.device))
        out = self.linear(x)
        self.linear.weight = away
        return out


def test_an_offloaded_weight_comes_for_each_call(
    model: PreTrainedModel, calls: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "_KNOWN_MODULES", (*projection._KNOWN_MODULES, __name__))
    check(replaced(model, Offloaded), {3: in_all(lambda module: module.on_host.mul_(2))})
    assert len(calls) == 4 * STEPS and not set(calls) & set(projection._kept)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_weight_in_eight_bits(model: PreTrainedModel, calls: list[nn.Module]) -> None:
    plain = logits(model, DynamicCache(config=model.config), {})

    def quantized(linear: nn.Linear) -> nn.Module:
        box = nn.Sequential(linear)
        quantize = torch.ao.quantization.quantize_dynamic
        return quantize(box, {nn.Linear}, dtype=torch.qint8)[0]

    replaced(model, quantized)
    error = (logits(model, DynamicCache(config=model.config), {}) - plain).abs().max().item()
    assert error > 10 * LOGIT_TOLERANCE
    # Stock rounds latents to eight bits, too, in which the matrix alone has no part.
    check(model, tolerance=error)
    assert len(calls) == 4 * STEPS


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_distributed_weight_is_never_kept(
    model: PreTrainedModel, mesh: Any, calls: list[nn.Module]
) -> None:
    expected = logits(model, DynamicCache(config=model.config), {})
    replaced(model, lambda linear: parallelize_module(linear, mesh, ColwiseParallel()))
    assert all(isinstance(one.weight, DTensor) for one in projections(model))
    result = logits(model, LatentKVCache(model.config), {})
    torch.testing.assert_close(result, expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert calls == projections(model) * STEPS and not set(calls) & set(projection._kept)
