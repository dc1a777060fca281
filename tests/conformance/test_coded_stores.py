"""Methods x coded stores: with 16 bits the outcome is that of full attention.

That fewer bits lose what the codec loses, and nothing else, is held by the tests of stores.
"""

from __future__ import annotations

import pytest

from hf_kvret import registered_methods

from .cases import ArtifactOptions, check_case

# Heads of qwen3 have 24 dims, which 8 divides.
CASES = [
    ("flat", "llama", "beams_ragged", "higgs"),
    ("paris", "qwen3", "chunked_prefill", "higgs-host"),
    ("lrqk", "gemma2", "crop_deep", "higgs-host"),
    ("ctkvr", "gpt_oss", "second_turn_ragged", "higgs"),
    ("a2ats", "llama", "prompt_lookup", "higgs-host"),
]


@pytest.mark.parametrize(("method", "model", "mode", "store"), CASES)
def test_with_16_bits_it_is_full_attention(
    method: str, model: str, mode: str, store: str, artifact_options: ArtifactOptions
) -> None:
    options = artifact_options(method, model)
    check_case(registered_methods()[method], model, mode, store, options, ())
