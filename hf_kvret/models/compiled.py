"""What runs outside of the graphs of ``torch.compile``."""

from __future__ import annotations

import torch

_REASON = (
    "leave out fullgraph=True: what a retrieval cache does stands between graphs. A model compiled "
    "without it gives the same tokens, and with it compile parts that see no cache, as each "
    "layer's mlp. For a cache of transformers, call hf_kvret.restore(model) before the model is "
    "compiled"
)

not_compiled = torch.compiler.disable(reason=_REASON)
"""Decorator of a function whose lengths and indices the compiler would trace again at every flush.

torch breaks the graph there; with ``fullgraph=True`` its error has our reason.
"""
