#!/usr/bin/env bash
# transformers 5.24.0: generate() with a cache of yours and use_cache=False gives wrong text.
#
# Expected: either an error, as the two arguments contradict each other, or the cache stays empty
#   and the answer is the one without a cache.
# Seen: no error and no warning. Each step reads the whole text again and appends all of it to the
#   cache, which holds 324 tokens where 44 are right. The new tokens attend to copies of the text,
#   so the answer changes after a few tokens. The same happens where only the model's
#   generation_config.json has use_cache false.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

torch.manual_seed(0)
shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(**shape, **heads, initializer_range=0.3, eos_token_id=None, pad_token_id=0)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(3, 40)[None]


def ask(cache=None, **options):
    cached = {} if cache is None else {"past_key_values": cache}
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False, **cached, **options)
    print(options, "tokens in the cache:", cache and cache.get_seq_length(), tokens[0, 37:].tolist())
    return tokens


right = ask(use_cache=False)
assert torch.equal(ask(DynamicCache()), right)
cache = DynamicCache()
assert not torch.equal(ask(cache, use_cache=False), right) and cache.get_seq_length() == 324
model.generation_config.use_cache = False
cache = DynamicCache()
assert not torch.equal(ask(cache), right) and cache.get_seq_length() == 324
EOF
