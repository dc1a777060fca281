#!/usr/bin/env bash
# transformers 5.24.0: behind a prompt, a layer with a sliding window holds the whole prompt.
#
# Expected: a layer of DynamicCache that slides over 512 tokens holds keys and values of 511 tokens,
#   as the sizes of layer.keys and layer.values say.
# Seen: both are views of the last rows of what the prompt made, so the memory of all of its tokens
#   stays until the next token comes, which makes tensors of the window's size. A prompt of 16,384
#   tokens keeps 32 times as much as the shapes say. Nothing of it is freed for what follows the
#   prompt: a fork of the cache, an index, or the first step.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import torch
from transformers import DynamicCache, Gemma3TextConfig

config = Gemma3TextConfig(
    num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=512, head_dim=64
)
cache = DynamicCache(config=config)


def held():
    tensors = cache.layers[0].keys, cache.layers[0].values
    shown = sum(tensor.nbytes for tensor in tensors)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    print(f"{cache.get_seq_length()} tokens: {shown:,} bytes by shape, {kept:,} bytes kept")
    return kept / shown


cache.update(torch.zeros(1, 1, 16_384, 64), torch.zeros(1, 1, 16_384, 64), 0)
assert held() > 32
cache.update(torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64), 0)
assert held() < 1.01
EOF
