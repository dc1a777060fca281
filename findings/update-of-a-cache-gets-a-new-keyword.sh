#!/usr/bin/env bash
# transformers 5.24.0: a cache that overrides `update` as it was documented raises TypeError in every model.
#
# Expected: a subclass of DynamicCache with update(key_states, value_states, layer_idx, cache_kwargs=None),
#   the signature of many releases, goes on working; new information would come in cache_kwargs.
# Seen: with 5.23.0 it generates. With 5.24.0 models call update(..., kwargs=kwargs), and it raises
#   "unexpected keyword argument 'kwargs'". The packages that do so name no upper bound, so pip installs
#   them beside 5.24 without a word. A subclass of a layer, or update(*args, **kwargs), is not affected.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for version in 5.23.0 5.24.0; do
    python3 -m venv "$place/$version"
    "$place/$version/bin/pip" install -q torch==2.13.0 "transformers==$version"
    "$place/$version/bin/python" - <<'EOF'
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


class Counting(DynamicCache):
    calls = 0

    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        self.calls += 1
        return super().update(key_states, value_states, layer_idx, cache_kwargs)


config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model, cache = LlamaForCausalLM(config).eval(), Counting()
try:
    model.generate(torch.ones(1, 4, dtype=torch.long), past_key_values=cache, max_new_tokens=3)
    seen = f"{cache.calls} calls"
except TypeError as error:
    seen = str(error)
print(transformers.__version__, seen)
assert ("'kwargs'" in seen) == (transformers.__version__ == "5.24.0")
EOF
done
