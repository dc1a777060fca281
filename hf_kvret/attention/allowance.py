"""How many new tokens a call of ``generate`` is expected to make.

``max_new_tokens`` is a limit, often one that is never reached. Memory that is kept free for a
million tokens would take away from what is sure, so that rows of a short prompt would be coded.
"""

from __future__ import annotations

from typing import Any

LEAST = 4096
"""New tokens that are expected of any text, where its limit allows them."""


def expected_new_tokens(generation_config: Any, context_len: int) -> int:
    """New tokens after ``context_len`` tokens, those held and those of the prompt.

    As many as there are then, but ``LEAST`` at least; never more than the limit of
    ``generation_config``, and never fewer than it asks for.
    """
    limit = generation_config.max_new_tokens
    if limit is None:
        limit = (generation_config.max_length or 0) - context_len
    sure = generation_config.min_new_tokens
    if sure is None:
        sure = (generation_config.min_length or 0) - context_len
    return max(0, min(limit, max(sure, context_len, LEAST)))
