#!/usr/bin/env bash
# transformers 5.24.0, optimum-quanto 0.2.7, torch 2.13.0: a QuantizedCache of quanto can't be copied.
#
# Expected: transformers' guide on caches reads a common prompt once, and gives each question
#   copy.deepcopy(prompt_cache). A quantized cache is a cache like others, and with backend="hqq" it is copied.
# Seen: with backend="quanto" deepcopy raises RuntimeError once the cache has codes, which is behind a prompt:
#   quanto's tensors are subclasses without a __deepcopy__ of their own, and torch's default wants a clone()
#   that returns the same subclass. An empty cache is copied, so a test without a prompt passes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 optimum-quanto==0.2.7 hqq==0.2.8
"$place/venv/bin/python" - <<'EOF'
import copy

import torch
from transformers import LlamaConfig, QuantizedCache

config = LlamaConfig(num_hidden_layers=1)
rows = torch.randn(2, 1, 2, 200, 64)
for name in ("hqq", "quanto"):
    cache = QuantizedCache(config=config, backend=name, nbits=4)
    copy.deepcopy(cache)
    print(f"{name}: an empty cache is copied")
    cache.update(rows[0], rows[1], 0)
    try:
        twin = copy.deepcopy(cache)
        assert name == "hqq" and twin.get_seq_length() == 200
        print(f"{name}: a cache of 200 tokens is copied")
    except RuntimeError as error:
        assert name == "quanto" and "__deepcopy__" in str(error), error
        print(f"{name}: a cache of 200 tokens raises RuntimeError: {str(error)[:45]}...")
EOF
