"""One operation of a pass fails, for want of memory or by Ctrl-C: nothing wrong follows in silence.

Each torch operation of a pass can be the last one before an error. What comes next is either right
to the last bit of what a pass without the error gives, or refused; never another result. A cache
that was refused is as new after ``reset()``, and a fork's original is unharmed.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.registry import registered_methods
from hf_kvret.testing import COVERING_OPTIONS, MODELS

from .methods.aqua_caches import attached

# Tokens of the passes before, and of the pass that fails.
PHASES: dict[str, tuple[tuple[int, ...], int]] = {
    "prompt": ((), 90),
    "step": ((90, 1), 1),
    "flushing step": ((90, 1, 1, 1), 1),
    "question": ((90, 1), 5),
    "second prompt": ((90, 1), 60),
}
METHODS = ("flat", "paris", "lrqk", "ctkvr", "h2o", "a2ats", "aqua")
STORES = ("device", "cpu", "resident", "higgs", "host")
# The path of an artifact, by method.
Artifacts = Callable[[str], str]
ERRORS = (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, RuntimeError)
EACH = 10
"""Faults of each combination of method, store and phase, 1950 in all."""

# By default one of each method, store and phase.
USUAL = [
    *(("flat", "device", "prompt"), ("paris", "cpu", "flushing step")),
    *(("lrqk", "resident", "question"), ("ctkvr", "higgs", "second prompt")),
    *(("h2o", "device", "step"), ("a2ats", "host", "flushing step"), ("aqua", "host", "question")),
]


class _Fault(TorchDispatchMode):
    """Raises in place of operation number ``at``, counted from 1; counts them all."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        if self.count == self.at:
            raise self.error(f"planted at operation {self.count}, {operation}")
        return operation(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return attached(MODELS["llama"].build())


@pytest.fixture(scope="module")
def artifacts(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    @functools.cache
    def artifact(method: str) -> str:
        return tiny_artifact(model, method, tmp_path_factory.mktemp(method))

    return artifact


def _ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 128, (2, count), generator=torch.Generator().manual_seed(seed))


class _Trial:
    """A method with a store, in a phase: what a pass and the one after it give without a fault."""

    def __init__(
        self, model: PreTrainedModel, artifacts: Artifacts, method: str, store: str, phase: str
    ) -> None:
        self.model, self.phase = model, phase
        self.kind = registered_methods()[method]
        self.options: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4, "store": store}
        self.is_coded = method == "aqua" or store == "higgs"
        if self.kind.needs_artifact:
            self.options["artifact"] = artifacts(method)
        self.ids, self.following = _ids(PHASES[phase][1], 9), _ids(1, 10)
        cache, self.original = self.prepared(), self.prepared()
        self.length = cache.get_seq_length()
        self.expected = self.run(cache, self.ids)
        self.expected_next = self.run(cache, self.following)
        # The first copy may build what the end of the prompt left to do, for all.
        for _ in range(2):
            counter = _Fault(0, RuntimeError)
            with counter:
                self.run(self.copy(), self.ids)
        self.operations = counter.count

    def new(self) -> Any:
        return self.kind(self.model.config, **self.options)

    def run(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(ids, past_key_values=cache).logits

    def copy(self) -> Any:
        """A cache to fail with."""
        # An empty cache has nothing that a fork could share.
        return self.original.fork() if PHASES[self.phase][0] else self.prepared()

    def prepared(self) -> Any:
        """A cache before the pass that fails."""
        cache = self.new()
        for number, count in enumerate(PHASES[self.phase][0]):
            self.run(cache, _ids(count, number))
        if self.phase == "flushing step":
            for number in range(40):
                if cache.retrieval_layers[0].kv.step_flushes():
                    return cache
                self.run(cache, _ids(1, 20 + number))
            raise AssertionError("no step flushes")
        return cache

    def check(self, cache: Any, at: int, error: type[BaseException]) -> str:
        """Fail at an operation, and go on: ``"complete"``, ``"retried"`` or ``"refused"``.

        ``"whole"`` where the pass ended before it: a fork may take fewer operations.
        """
        try:
            with _Fault(at, error):
                result = self.run(cache, self.ids)
        except error as planted:
            assert f"planted at operation {at}," in str(planted), f"{planted} in its place"
        else:
            assert torch.equal(result, self.expected), "a pass without a fault is wrong"
            return "whole"
        layers = cache.retrieval_layers
        lengths = {layer.get_seq_length() for layer in layers}
        complete = lengths == {self.length + self.ids.shape[1]}
        complete = complete and not any(layer.pending_attention for layer in layers)
        try:
            result = self.run(cache, self.following if complete else self.ids)
            last = result if complete else self.run(cache, self.following)
        except (RuntimeError, ValueError) as refusal:
            assert "planted" not in str(refusal)
            self.check_crop(cache)
            cache.reset()
            new, prompt = self.new(), _ids(70, 4)
            for ids in (prompt, self.following):
                assert torch.equal(self.run(cache, ids), self.run(new, ids)), "reset is not as new"
            return "refused"
        if not complete:
            assert torch.equal(result, self.expected), "a pass that was tried again is wrong"
        assert torch.equal(last, self.expected_next), "the pass after it is wrong"
        return "complete" if complete else "retried"

    def check_crop(self, cache: Any) -> None:
        """A crop drops what the pass left, or says that a layer was torn in the middle."""
        try:
            cache.crop(0)
        except RuntimeError as torn:
            assert "while a layer took its tokens in" in str(torn)
            return
        assert cache.get_seq_length() == self.length == len(cache.tokens)
        # Rows that were coded before the pass reads them are others.
        if self.is_coded:
            return
        for ids, expected in ((self.ids, self.expected), (self.following, self.expected_next)):
            torch.testing.assert_close(self.run(cache, ids), expected, atol=1e-4, rtol=0)


def _check(
    model: PreTrainedModel, artifacts: Artifacts, combination: tuple[str, str, str], count: int
) -> Counter[str]:
    """Ends of ``count`` trials, counted."""
    trial = _Trial(model, artifacts, *combination)
    rng = random.Random("/".join(combination))
    ends: Counter[str] = Counter()
    operations = rng.sample(range(1, trial.operations + 1), min(count, trial.operations))
    for at in operations:
        error = rng.choice(ERRORS)
        try:
            ends[trial.check(trial.copy(), at, error)] += 1
        except Exception as wrong:
            where = f"{combination}, operation {at} of {trial.operations}, {error.__name__}"
            raise AssertionError(f"{where}: {wrong}") from wrong
    assert torch.equal(trial.run(trial.original, trial.ids), trial.expected), (
        "the original was harmed"
    )
    return ends


@pytest.mark.parametrize("combination", USUAL, ids="-".join)
def test_a_fault_in_any_operation_is_never_silent(
    combination: tuple[str, str, str], model: PreTrainedModel, artifacts: Artifacts
) -> None:
    assert _check(model, artifacts, combination, 2).total() == 2


_PAIRS = [
    (method, store)
    for method in METHODS
    for store in STORES
    if registered_methods()[method].Config.takes("store", store)
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "store"), _PAIRS)
def test_many_faults_in_every_phase_are_never_silent(
    method: str, store: str, model: PreTrainedModel, artifacts: Artifacts
) -> None:
    for phase in PHASES:
        ends = _check(model, artifacts, (method, store, phase), EACH)
        # A copy may take an operation or two fewer than the one that was counted.
        assert ends["whole"] <= 2, f"{phase}: {ends['whole']} passes had no fault"
