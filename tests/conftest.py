"""Shared by all tests: Triton's interpreter where there is no GPU, and places to run a kernel."""

import functools
import gc
import importlib.util
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Without its cache pytest rewrites the assertions of every test file anew, some 10 s a process.
sys.dont_write_bytecode = False
# A job in the background ignores Ctrl-C and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A process that hands tests out to others (-n 2) needs neither torch nor kernels, which take
# seconds. One that collects, or debugs, does it itself.
_WORDS = " ".join(sys.argv)
if (
    "PYTEST_XDIST_WORKER" in os.environ
    or not re.search(r" (-n ?|--numprocesses[ =])[1-9al]", _WORDS)
    or re.search(r" --(co|pdb)", _WORDS)
):
    import torch

    # Triton reads this when a kernel is defined, so it is set before any test imports one.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from .interpreter import patch_interpreter

        patch_interpreter()

PLACES: dict[str, tuple[str, ...]] = {
    "naive-cpu": ("naive", "cpu"),
    "triton-cpu": ("triton", "cpu"),
    "triton-cuda": ("triton", "cuda"),
}


class Factor(NamedTuple):
    """Values of one argument of a test, or of some together, each as ``pytest.param`` with an id.

    Attributes:
        names: the arguments.
        params: the values.
        indirect: whether fixtures of these names take the values.
    """

    names: list[str]
    params: list[Any]
    indirect: bool = False


@pytest.fixture
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """``(backend, device)`` of a kernel: torch, Triton's interpreter, Triton on a GPU."""
    return request.param


@pytest.fixture
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """As `place`, or an instruction set of the compiled library."""
    backend, device, *instructions = request.param
    for name in instructions:
        monkeypatch.setenv("HF_KVRET_CPU_PATH", name)
    return backend, device


def _why_not(backend: str, device: str) -> str | None:
    """Why this machine can't run a kernel at a place; None where it can."""
    if backend == "cpp":
        # Imported here, because the lines on top must come before any module with a kernel.
        from hf_kvret_kernels.host_library import why_not

        return why_not() or None
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    if device == "cuda" and interpreting:
        return "TRITON_INTERPRET=1 is set: no kernel is compiled"
    if backend == "triton" and device == "cpu" and not interpreting:
        return "Triton runs on the CPU with TRITON_INTERPRET=1 only; the GPU is tested instead"
    return None


def _library_places() -> dict[str, tuple[str, ...]]:
    """One for each instruction set of the compiled library that this processor has."""
    # Imported here, because the lines on top must come before any module with a kernel.
    from hf_kvret_kernels import host_library

    if host_library.why_not():
        return {"cpp": ("cpp", "cpu")}
    return {f"cpp-{name}": ("cpp", "cpu", name) for name in host_library.paths()}


@functools.cache
def _places(fixture: str) -> tuple[list[Any], list[Any]]:
    """Places that this machine has, and the others, which are skipped with a reason."""
    here, elsewhere = [], []
    for name, place in (PLACES | (_library_places() if fixture == "where" else {})).items():
        backend, device = place[:2]
        marks = [pytest.mark.gpu] if device == "cuda" else []
        reason = _why_not(backend, device)
        if reason is not None:
            marks.append(pytest.mark.skip(reason=reason))
        param = pytest.param(place, id=name, marks=marks)
        (here if reason is None else elsewhere).append(param)
    return here, elsewhere


def pytest_sessionstart() -> None:
    """Collecting makes objects that stay: going through them for garbage takes seconds."""
    gc.disable()


# Folders and files of tests that take under a minute together: what is read and changed most.
FAST = (
    *("contracts", "layer", "observe", "options", "patches", "artifacts", "mutants"),
    *("test_cache.py", "test_rooms.py"),
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m fast`` imports none of the other tests."""
    tests = Path(__file__).parent
    if config.getoption("markexpr") != "fast" or collection_path.parent != tests:
        return None
    return True if collection_path.name not in FAST else None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[Any] | None:
    """Cases of slow tests are made only where slow tests are asked for: they are thousands."""
    if collector.config.getoption("markexpr") not in ("not slow", "fast"):
        return None
    marks = getattr(obj, "pytestmark", []) if inspect.isfunction(obj) else []
    return [] if any(mark.name == "slow" for mark in marks) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ``FAST`` that are not slow."""
    tests = Path(__file__).parent
    for item in items:
        name = item.path.relative_to(tests).parts[0]
        if name in FAST and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)


def pytest_collection_finish() -> None:
    """Tests that let things go expect them to be collected, and what is there by now stays."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process takes tests that stand together, as they share what they make; then others'."""
    # Imported here, because only a run of several processes has it.
    from xdist.scheduler import WorkStealingScheduling

    is_default = config.getoption("dist") == "load"
    return WorkStealingScheduling(config, log) if is_default else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases of a test with marks ``factor``, which read as ``parametrize``, in a pairwise design.

    Any two values of two factors meet in some case. The rest of the full product is slow, and it is
    made only where slow tests are asked for (``-m slow``). A mark ``allowed`` has a function
    ``when``, which tells of some values by name, or of all, whether there may be such a case. Or it
    has pairs of names to ``meet``: by default their values meet, and others come once.

    ``place`` and ``where`` are factors of every test that takes them. A place that this machine
    lacks adds one case to a test, which says why it is skipped.
    """
    marks = metafunc.definition.iter_markers("factor")
    factors = [_factor(*mark.args, **mark.kwargs) for mark in marks]
    # The marks of a module are for those of its tests that take such arguments.
    factors = [each for each in factors if {*each.names} <= {*metafunc.fixturenames}]
    elsewhere: list[Any] = []
    for name in ("place", "where"):
        if name in metafunc.fixturenames and not any(name in each.names for each in factors):
            here, elsewhere = _places(name)
            factors.append(Factor([name], here, indirect=True))
    if not factors:
        return
    # Imported here, because the lines on top must come before any module with a kernel.
    from .pairs import full_product, pairwise

    mark = metafunc.definition.get_closest_marker("allowed")
    rules = mark.kwargs if mark else {}
    number = {name: key for key, each in enumerate(factors) for name in each.names}
    meet = [(number[one], number[other]) for one, other in rules.get("meet", ())]

    def allowed(case: dict[int, int]) -> bool:
        if "when" not in rules:
            return True
        rows = [(factors[key].names, factors[key].params[at].values) for key, at in case.items()]
        return rules["when"](
            {name: value for names, row in rows for name, value in zip(names, row, strict=True)}
        )

    indices = {key: range(len(each.params)) for key, each in enumerate(factors)}
    default = pairwise(indices, allowed, meet if "meet" in rules else None)
    rows = [_params(factors, case) for case in default]
    cases = [_merged(row) for row in rows]
    cases += [_merged([*rows[0][:-1], place]) for place in elsewhere]
    if metafunc.config.getoption("markexpr") not in ("not slow", "fast"):
        kept = {tuple(case.values()) for case in default}
        others = [
            case
            for case in full_product(indices)
            if tuple(case.values()) not in kept and allowed(case)
        ]
        cases += [_merged(_params(factors, case), pytest.mark.slow) for case in others]
    metafunc.parametrize(
        [name for each in factors for name in each.names],
        cases,
        indirect=[name for each in factors if each.indirect for name in each.names],
    )


def _factor(
    names: str | Sequence[str],
    values: Iterable[Any],
    ids: Callable[[Any], object] | Sequence[str] | None = None,
    indirect: bool = False,
) -> Factor:
    """The arguments are those of ``parametrize``."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    params = []
    for number, value in enumerate(values):
        if not hasattr(value, "marks"):
            value = pytest.param(*(value if len(names) > 1 else [value]))
        name = value.id
        if name is None and isinstance(ids, Sequence):
            name = ids[number]
        if name is None:
            named = zip(names, value.values, strict=True)
            name = "-".join(_label(each, f"{key}{number}", ids) for key, each in named)
        params.append(pytest.param(*value.values, id=name, marks=value.marks))
    return Factor(names, params, indirect)


def _label(value: Any, otherwise: str, ids: Any) -> str:
    """The name of a value as pytest has it, but dtypes by name, which pytest counts."""
    if callable(ids):
        return str(ids(value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, str | int | float | bool):
        return str(value)
    return getattr(value, "__name__", otherwise)


def _params(factors: Sequence[Factor], case: dict[int, int]) -> list[Any]:
    return [factors[key].params[at] for key, at in case.items()]


def _merged(params: Sequence[Any], *marks: pytest.MarkDecorator) -> Any:
    """One ``pytest.param`` of several."""
    return pytest.param(
        *(value for param in params for value in param.values),
        id="-".join(param.id for param in params),
        marks=[*marks, *(mark for param in params for mark in param.marks)],
    )


@pytest.fixture
def llama() -> Any:
    """A small model, new in each test."""
    # Imported here, because the lines above must come before any module with a kernel.
    from hf_kvret.testing import MODELS

    return MODELS["llama"].build()


@pytest.fixture
def model(llama: Any) -> Any:
    return llama


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """``owner, name, note -> list``: what ``note`` says of the arguments of each call.

    ``owner.name`` is a function or a method, and goes on as before.
    """

    def begin(owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
        notes, real = [], getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            notes.append(note(*args, **options))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, noting)
        return notes

    return begin


@pytest.fixture
def temporaries() -> Callable[[Callable[[], object]], int]:
    """``work -> bytes``: the most that ``work`` allocated on the CPU above what it left.

    Of torch's allocator, so also within an operation; the same every time.
    """

    # Imported here, because a process that hands tests out has no torch.
    from torch.profiler import ProfilerActivity, profile

    def measure(work: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        results = profiler.profiler.kineto_results
        events = [event for event in results.events() if event.name() == "[memory]"]
        current = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            current += event.nbytes()
            most = max(most, current)
        return most - max(0, current)

    return measure


@pytest.fixture(scope="session")
def artifact_options(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], dict[str, str]]:
    """``(method, model of the zoo)`` -> the options that name its artifact, if it needs one."""
    # Imported here, because the lines above must come before any module with a kernel.
    from hf_kvret import registered_methods
    from hf_kvret.lab.calibrate.tiny import tiny_artifact
    from hf_kvret.testing.conformance import ALL_MODELS

    paths: dict[tuple[str, str], str] = {}

    def find(method: str, model: str) -> dict[str, str]:
        if not registered_methods()[method].needs_artifact:
            return {}
        if (method, model) not in paths:
            folder = tmp_path_factory.mktemp(f"{method}-{model}")
            paths[method, model] = tiny_artifact(ALL_MODELS[model].build(), method, folder)
        return {"artifact": paths[method, model]}

    return find


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``program(*words, status=0)`` runs ``hf-kvret``; its ``out`` and ``err`` were printed."""
    from hf_kvret.cli import main

    def run(*words: object, status: int = 0) -> Any:
        capsys.readouterr()
        try:
            ended: Any = main([*map(str, words)])
        except SystemExit as stopped:
            ended = stopped.code
        assert ended == status
        return capsys.readouterr()

    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A hub in memory that the client in this process talks to: an empty cache, no token."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils._http import default_client_factory

    from .artifacts.fake_hub import FakeHub

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeHub()
    huggingface_hub.set_client_factory(fake.client)
    yield fake
    huggingface_hub.set_client_factory(default_client_factory)
