"""Every mode of use, with decode steps that are captured and replayed where generate can.

Slow: the kernels run in Triton's interpreter, as a GPU would launch them.
"""

from __future__ import annotations

import pytest

from hf_kvret import FlatKVCache
from hf_kvret.testing import COVERING_OPTIONS, MODES, failures, run_conformance
from hf_kvret.testing.tape import taped


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_modes_with_replayed_steps_equal_full_attention(mode: str) -> None:
    with taped():
        results = run_conformance(
            lambda model: FlatKVCache(config=model.config, **COVERING_OPTIONS),
            models=["llama"],
            modes=[mode],
        )
    assert not failures(results)
