"""Which backend runs: by device, by name, and by what a context prefers."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch

from hf_kvret_kernels import _dispatch
from hf_kvret_kernels._dispatch import choose_backend, interpreted, prefer

TENSOR = torch.zeros(1)
needs_interpreter = pytest.mark.skipif(
    not interpreted() or find_spec("triton") is None, reason="Triton's interpreter is off"
)


@needs_interpreter
def test_auto_is_what_the_context_prefers_and_only_there() -> None:
    assert choose_backend("auto", TENSOR) == "naive"
    with prefer("triton"):
        assert choose_backend("auto", TENSOR) == "triton"
        assert choose_backend("naive", TENSOR) == "naive"
        with prefer("naive"):
            assert choose_backend("auto", TENSOR) == "naive"
            assert choose_backend("triton", TENSOR) == "triton"
        assert choose_backend("auto", TENSOR) == "triton"
    assert choose_backend("auto", TENSOR) == "naive"


@needs_interpreter
def test_other_threads_keep_their_own() -> None:
    with prefer("triton"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(choose_backend, "auto", TENSOR).result() == "naive"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not _dispatch.interpreted()
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        choose_backend("triton", TENSOR)
    with prefer("triton"), pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        choose_backend("auto", TENSOR)


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_a_preference_that_says_nothing_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="prefer one of naive, triton"), prefer(backend):
        pass
