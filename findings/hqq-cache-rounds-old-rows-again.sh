#!/usr/bin/env bash
# transformers 5.24.0, hqq 0.2.8: QuantizedCache(backend="hqq") rounds old rows again every 128 tokens.
#
# Expected: a row is rounded once, so its error stays as long as the cache lives.
# Seen: every residual_length (128) tokens all rows are unpacked, joined with the new ones, and rounded
#   anew. With the default axis 0, groups go across rows, so that each time a row gets other scales, and
#   the error of the first rows grows by half and more. With axis_key=1 and axis_value=1 a group lies
#   within a row: it is rounded to the same numbers, and the error stays.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 hqq==0.2.8
"$place/venv/bin/python" - <<'EOF'
import torch
from transformers import LlamaConfig, QuantizedCache

config = LlamaConfig(num_hidden_layers=1)


def errors(**axes):
    torch.manual_seed(0)
    rows = torch.randn(2, 1, 2, 128 + 1152, 64)
    cache = QuantizedCache(config=config, backend="hqq", nbits=4, **axes)
    cache.update(rows[0, :, :, :128], rows[1, :, :, :128], 0)
    seen = []
    for token in range(128, 1280):
        keys, _ = cache.update(*rows[:, :, :, token : token + 1], 0)
        seen.append(float((keys[:, :, :128] - rows[0, :, :, :128]).square().mean().sqrt()))
    return seen[0], seen[-1]


for axes in ({}, {"axis_key": 1, "axis_value": 1}):
    first, last = errors(**axes)
    print(f"{axes}: error of the first 128 keys {first:.3f}, 1,152 tokens later {last:.3f}")
    assert last > 1.5 * first if not axes else last < 1.1 * first
EOF
