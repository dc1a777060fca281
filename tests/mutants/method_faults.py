"""Faults in the methods."""

from __future__ import annotations

from fault import Fault

FAULTS = (
    Fault(
        "ids-of-another-dtype",
        "hf_kvret/methods/flat/index.py",
        "return top_indices(scores, keys.shape[1], cold.budget)",
        "return top_indices(scores, keys.shape[1], cold.budget).long()",
    ),
    Fault(
        "padding-selected",
        "hf_kvret/methods/flat/index.py",
        'scores = scores.masked_fill(~cold.valid[:, None, None], float("-inf"))',
        "assert cold.valid is not None",
    ),
    Fault(
        "counts-of-dropped-keys-kept",
        "hf_kvret/methods/paris/index.py",
        "self._counts = self._counts - paris.count_centroids(",
        "paris.count_centroids(",
    ),
    Fault(
        "lists-name-dropped-tokens",
        "hf_kvret/methods/ctkvr/inverted_file.py",
        "ids.masked_fill_(ids >= length, -1)",
        "ids.masked_fill_(ids > length, -1)",
    ),
    Fault(
        "dropped-codes-selected",
        "hf_kvret/methods/a2ats/index.py",
        "self._cold = min(self._cold, length)",
        "pass",
    ),
    Fault(
        "calibrated-with-queries-that-are-not-absorbed",
        "hf_kvret/lab/calibrate/a2ats.py",
        "rows = chunk if heads is None else heads.absorb(chunk)",
        "rows = chunk",
    ),
)
