"""Prompts and decode steps of a tiny model with a cache, on a simulated GPU."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret import RetrievalCache
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.replay import DecodeGraph
from hf_kvret.testing.models import spread_weights

from ..simulated_gpu.device import simulated, to_device
from ..simulated_gpu.simulation import Simulation

METHODS = ("flat", "paris", "lrqk", "ctkvr", "a2ats", "h2o")
STORES = ("device", "host", "resident", "cpu", "disk", "higgs", "higgs-host")
MODES = ("eager", "graph", "padded", "chunks", "fork", "crop", "saved", "two devices")
_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
# By type, what its configuration has beside or in place of these.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "deepseek_v3": {
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 2,
    },
}  # fmt: skip
_OPTIONS: dict[str, Any] = {
    "top_k": 4, "sink": 2, "recent": 6, "flush": 4, "max_draft": 4, "dense_below": 0,
}  # fmt: skip
_PROMPT, STEPS = 14, 9
# Other kernels add in another order; logits are about 13 at most.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A cache, its model and what is done with them.

    Attributes:
        method: name of a cache.
        store: where its cold rows lie; empty where the method has its own.
        mode: one of ``MODES``.
        family: type of the model, one of ``FAMILIES``.
        steps: decoded after the prompt.
        layers: of the model.
        select_every: option of the cache.
    """

    method: str
    store: str
    mode: str = "eager"
    family: str = "llama"
    steps: int = STEPS
    layers: int = 2
    select_every: int = 1

    @property
    def selects_by_noise(self) -> bool:
        """Whether rounding decides which tokens are selected; then all of them are.

        lrqk makes its factors of the keys, and reads the coded ones to project all again. There are
        fewer keys than dims here, so some directions of the factors are rounding. The keys have
        nothing there, but the error of their codes has. On a CPU alone, weights that differ by 1e-7
        lead to other tokens.
        """
        return self.method == "lrqk" and self.store.startswith("higgs")

    def __str__(self) -> str:
        family = "" if self.family == "llama" else self.family
        steps = "" if self.steps == STEPS else f"{self.steps}-steps"
        layers = "" if self.layers == 2 else f"{self.layers}-layers"
        shared = "" if self.select_every == 1 else "shared"
        words = self.method, self.store, self.mode, family, steps, layers, shared
        return "-".join(filter(None, words))


def cases() -> list[Case]:
    """Every method, store and mode that a GPU serves; latents with some of them."""
    pairs = [*product(METHODS, STORES), ("aqua", "")]
    latent = [*product(METHODS, ("device", "resident", "cpu", "higgs-host"), ("graph", "saved"))]
    latent += product(("latent", "aqua"), ("",), ("eager", "padded", "crop"))
    return [
        *(Case(*pair, mode) for pair in pairs for mode in MODES),
        *(Case(*case, "deepseek_v3") for case in latent),
        *(
            Case("flat", store, mode, select_every=2)
            for store, mode in zip(("host", "resident", "device", "cpu"), MODES[1::2], strict=True)
        ),
    ]


class Outcome:
    """A case that runs, and its results.

    Attributes:
        case: that runs.
        gpu: what it ran on, and what was found; None for a CPU.
        logits: ``[B, V]`` fp32 of the prompt's chunks and of each step, on the CPU.
        replays: steps that were replayed.
        error: that ended it, or None.
    """

    def __init__(self, case: Case, gpu: Simulation | None) -> None:
        self.case, self.gpu = case, gpu
        self.logits: list[torch.Tensor] = []
        self.replays = 0
        self.error: Exception | None = None
        self._device = "cpu" if gpu is None else "cuda"
        self._is_captured = case.mode == "graph" and gpu is not None
        # A new one, which may move to the simulated GPU.
        self._model = new_model(case.family, num_hidden_layers=case.layers)
        hf_kvret.attach(self._model)

    def run(self) -> None:
        """Up to its end or the first error, which is raised."""
        with (
            torch.inference_mode(),
            warnings.catch_warnings(),
            tempfile.TemporaryDirectory() as folder,
        ):
            warnings.simplefilter("ignore")
            if self.gpu is not None:
                to_device(self._model, "cuda:0")
                if self.case.mode == "two devices":
                    _spread_out(self._model)
            logits = self._run(Path(folder))
            self.logits = [each.float().cpu() for each in logits]

    def _run(self, folder: Path) -> list[torch.Tensor]:
        mode, cached = self.case.mode, self._new_cache()
        batch = 1 if mode == "chunks" else 2
        positions = torch.arange(batch * _PROMPT, device=self._device).view(batch, _PROMPT)
        tokens = positions * 7 % 50 + 10
        mask = torch.ones_like(tokens)
        if mode == "padded":
            mask[1, :5] = 0
        graph = DecodeGraph(self._model, cached) if self._is_captured else None
        call = graph or self._model
        self._begin("prompt")
        chunk_len = 5 if mode == "chunks" else _PROMPT
        cached.expect(_PROMPT, chunk_len, self.case.steps)
        length, logits = 0, []
        for chunk in tokens.split(chunk_len, dim=1):
            length += chunk.shape[1]
            logits.append(self._feed(call, cached, chunk, mask[:, :length]))
        for number in range(self.case.steps):
            if number == self.case.steps // 2 and mode in ("fork", "crop", "saved"):
                cached, dropped = self._changed(cached, folder)
                mask = mask[:, : mask.shape[1] - dropped]
            layer = cached.retrieval_layers[0]
            assert layer.kv is not None, "the prompt went through it"
            flushes = layer.kv.step_flushes()
            # The first step makes the index, and so does one after a change.
            self._begin("flush" if flushes else "decode" if number % 4 else "first")
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits.append(self._feed(call, cached, logits[-1].argmax(-1, keepdim=True), mask))
            self.replays = 0 if graph is None else graph.replays
        # The cache is freed here, and unpins its rows.
        self._begin("after")
        return logits

    def _new_cache(self) -> RetrievalCache:
        case = self.case
        cls = hf_kvret.registered_methods()[case.method]
        options = {**_OPTIONS, "select_every": case.select_every}
        takes = cls.Config.takes
        options = {name: value for name, value in options.items() if takes(name, value)}
        if case.selects_by_noise:
            options["top_k"] = _PROMPT + case.steps
        if case.store:
            options["store"] = case.store
        if case.store == "disk":
            options["disk"] = tempfile.gettempdir()
        options |= _artifact_option(case)
        return cls(self._model.config, **options, graph="auto" if self._is_captured else False)

    def _begin(self, phase: str) -> None:
        if self.gpu is not None:
            self.gpu.phase = phase

    def _feed(
        self, call: Callable[..., Any], cached: RetrievalCache, tokens: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        padding = {"attention_mask": mask} if self.case.mode == "padded" else {}
        cache = {"past_key_values": cached, "use_cache": True}
        out = call(input_ids=tokens, position_ids=positions, **cache, **padding)
        last: torch.Tensor = out.logits[:, -1]
        return last

    def _changed(self, cached: RetrievalCache, folder: Path) -> tuple[RetrievalCache, int]:
        """The cache to go on with, and how many tokens it has dropped."""
        self._begin("change")
        if self.case.mode == "crop":
            cached.crop(-3)
            return cached, 3
        if self.case.mode == "fork":
            return cached.fork(), 0
        cached.save_pretrained(folder)
        options = {"device": self._device, **_artifact_option(self.case)}
        return type(cached).from_pretrained(folder, self._model.config, **options), 0


def run(case: Case) -> Outcome:
    """Run a case to its end."""
    outcome = attempt(case)
    if outcome.error is not None:
        raise outcome.error
    return outcome


def attempt(case: Case) -> Outcome:
    """Run a case on simulated GPUs up to its first error, or to its end."""
    # The artifact is learned on the CPU, before a GPU is simulated.
    _artifact_option(case)
    with simulated(2 if case.mode == "two devices" else 1) as gpu:
        outcome = Outcome(case, gpu)
        try:
            outcome.run()
        except Exception as error:  # whatever a planted fault leads to
            outcome.error = error
    return outcome


def check_logits(outcome: Outcome) -> None:
    """AssertionError where logits are not those of the same case on a CPU, with its kernels.

    Each step runs eagerly there, and all layers lie on one device.
    """
    expected = Outcome(outcome.case, None)
    expected.run()
    torch.testing.assert_close(outcome.logits, expected.logits, rtol=0, atol=_TOLERANCE)


def new_model(family: str = "llama", **sizes: int) -> PreTrainedModel:
    """A small model of a family, with ``sizes`` in place of its own."""
    config = AutoConfig.for_model(family, **_SMALL | FAMILIES[family] | sizes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    # ``generate`` chooses these for its steps on a device.
    model.set_experts_implementation("batched_mm")
    spread_weights(model, seed=3)
    return model.eval()


def _artifact_option(case: Case) -> dict[str, str]:
    """The option that names an artifact for the case's model, where its method needs one."""
    needed = case.method in ("a2ats", "aqua")
    return {"artifact": _artifact(case.method, case.family)} if needed else {}


@cache
def _artifact(method: str, family: str) -> str:
    """Where an artifact of the method lies, for a family's model."""
    folder = tempfile.mkdtemp(prefix="hf_kvret_simcuda_")
    return tiny_artifact(new_model(family), method, Path(folder))


def _spread_out(model: PreTrainedModel) -> None:
    """The second layer lies on the second device, as ``device_map`` would have it."""
    second = model.model.layers[1]
    to_device(second, "cuda:1")
    for module, device in ((second, "cuda:1"), (model.model.norm, "cuda:0")):
        module.register_forward_pre_hook(_mover(device), with_kwargs=True)


def _mover(device: str) -> Callable[..., Any]:
    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        del module
        return tree_map(moved, (args, kwargs))

    return hook
