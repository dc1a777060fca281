"""For authors of indexes and stores: does a cache of yours give what full attention gives?

from hf_kvret.testing import COVERING_OPTIONS, failures, run_conformance

results = run_conformance(lambda model: MyCache(config=model.config, **COVERING_OPTIONS))
assert not failures(results)
"""

from hf_kvret.testing.conformance import (
    COVERING_OPTIONS,
    LOGIT_TOLERANCE,
    Case,
    Result,
    all_valid,
    check,
    cold_rows_read,
    conformance_cases,
    failures,
    held_tokens,
    no_proof,
    reads_cold_rows,
    run_case,
    run_conformance,
)
from hf_kvret.testing.indexed_models import INDEXED_MODELS
from hf_kvret.testing.models import (
    GEMMA4_MODELS,
    HYBRID_MODELS,
    LATENT_MODELS,
    MODELS,
    REFUSED,
    SHARED_MODELS,
    TinyModel,
)
from hf_kvret.testing.modes import MODES, Mode
from hf_kvret.testing.scenario import Outcome, Scenario

__all__ = [
    "COVERING_OPTIONS",
    "GEMMA4_MODELS",
    "HYBRID_MODELS",
    "INDEXED_MODELS",
    "LATENT_MODELS",
    "LOGIT_TOLERANCE",
    "MODELS",
    "MODES",
    "REFUSED",
    "SHARED_MODELS",
    "Case",
    "Mode",
    "Outcome",
    "Result",
    "Scenario",
    "TinyModel",
    "all_valid",
    "check",
    "cold_rows_read",
    "conformance_cases",
    "failures",
    "held_tokens",
    "no_proof",
    "reads_cold_rows",
    "run_case",
    "run_conformance",
]
