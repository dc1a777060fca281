"""Checks an installed wheel: ``python -I .ci/installed_check.py`` with the python that has it.

The packages and the compiled library must come from that environment, and a decode step of
``generate`` must be a call of the library for each layer.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import hf_kvret
import hf_kvret_model_patches
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret_kernels import host_library, host_step

PROMPT, NEW_TOKENS = 3_000, 8


def main() -> int:
    library = Path(host_library.load()._name)
    for place in (library, Path(hf_kvret.__file__), Path(hf_kvret_model_patches.__file__)):
        if not place.is_relative_to(sys.prefix):
            print(f"{place} is not of {sys.prefix}")
            return 1
    calls: Counter[str] = Counter()
    run_step = host_step.run_unchecked

    def count(*arguments: Any) -> Any:
        calls["hfk_run_step"] += 1
        return run_step(*arguments)

    host_step.run_unchecked = count
    model = load_bundled_model()
    tokens = torch.randint(3, model.config.vocab_size, (1, PROMPT))
    options = {"top_k": 64, "dense_below": 0}
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        cache_implementation="paris",
        cache_config=options,
    )
    # The first token comes from the prompt's pass.
    wanted = model.config.num_hidden_layers * (NEW_TOKENS - 1)
    print(f"instruction sets: {', '.join(host_library.paths())}; calls: {dict(calls)}")
    if calls["hfk_run_step"] != wanted:
        print(f"{wanted} calls of hfk_run_step were expected")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
