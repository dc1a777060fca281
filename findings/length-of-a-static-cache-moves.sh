#!/usr/bin/env bash
# transformers 5.24.0: a length that was asked of a StaticCache changes while the cache goes on.
#
# Expected: get_seq_length() is declared to give an int. The one from before a draft, less the one behind it, says what
#   crop has to take off, whatever the cache.
# Seen: a StaticCache gives the tensor in which it counts, and adds to it in place. The length from before the draft
#   is the later one, too, so their difference is 0: crop(0) takes nothing off, and the next token sees the draft.
#   int() at once helps. An empty StaticCache gives a number, 0, and one whose first layer slides always does, so a
#   test with either passes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import warnings

import torch
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, StaticCache

warnings.simplefilter("error")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes)).eval()
prompt, draft, token = torch.randint(3, 64, (1, 17)).split([12, 4, 1], dim=1)


@torch.no_grad()
def next_logits(cache, keep=lambda length: length, drafted=True):
    """The logits behind one more token, and how many tokens of a draft were taken back before it."""
    taken = 0
    model(prompt, cache=cache)
    if drafted:
        before = keep(cache.get_seq_length())
        model(draft, cache=cache)
        taken = int(cache.get_seq_length() - before)
        cache.crop(-taken)
    return model(token, cache=cache).logits[0, -1], taken


def static():
    return StaticCache(config=model.config, max_cache_len=32)


sliding = StaticCache(config=Gemma3TextConfig(), max_cache_len=32)
sliding.update(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), 0)
assert type(static().get_seq_length()) is int and type(sliding.get_seq_length()) is int
exact, _ = next_logits(DynamicCache(config=model.config), drafted=False)
cases = {
    "DynamicCache": (DynamicCache(config=model.config), {}, 4),
    "StaticCache": (static(), {}, 0),
    "StaticCache, int() at once": (static(), {"keep": int}, 4),
}
for name, (cache, options, expected) in cases.items():
    logits, taken = next_logits(cache, **options)
    change = (logits - exact).abs().max().item()
    print(f"{name}: {taken} tokens of the draft taken back, logits differ by {change:.3f}")
    assert taken == expected and (change < 1e-3 if taken else change > 0.1)
EOF
