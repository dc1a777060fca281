#!/usr/bin/env bash
# transformers 5.24.0: a cache that keeps its rows itself gives wrong text in a padded batch, without a word.
#
# Expected: a subclass of DynamicCache that overrides update and get_seq_length works, or raises. One text gives
#   the tokens of DynamicCache.
# Seen: masks are made by get_mask_sizes, which looks at the cache's own `layers`. These stay empty, and a mask
#   covers the new tokens alone. With SDPA, the default, a padded row attends to its padding, and several
#   tokens of a next turn attend to the first ones of the text. Eager attention raises in a next turn. With
#   get_mask_sizes overridden, too, all are right. A test with one prompt does not notice.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" -W ignore - <<'EOF'
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


class OwnRows(DynamicCache):
    def __init__(self):
        super().__init__()
        self.rows = {}

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if layer_idx in self.rows:
            keys, values = (torch.cat(x, 2) for x in zip(self.rows[layer_idx], (keys, values)))
        self.rows[layer_idx] = keys, values
        return keys, values

    def get_seq_length(self, layer_idx=0):
        return self.rows[layer_idx][0].shape[2] if layer_idx in self.rows else 0


class WithMask(OwnRows):
    def get_mask_sizes(self, query_length, layer_idx):
        return self.get_seq_length(layer_idx) + query_length, 0


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, eos_token_id=None, pad_token_id=0)).eval()
ids = torch.randint(3, 64, (2, 12))
padded = torch.ones_like(ids)
padded[1, :5] = 0


@torch.no_grad()
def answers(cache, case):
    """The last logits of two calls in turn."""
    if case == "padded batch":
        model(ids, past_key_values=cache, attention_mask=padded)
        mask = torch.cat([padded, padded[:, -1:]], dim=1)
        return model(ids[:, :1], past_key_values=cache, attention_mask=mask).logits[:, -1]
    count = 1 if case == "next token" else 4
    model(ids[:1], past_key_values=cache)
    return model(ids[1:, :count], past_key_values=cache).logits[:, -1]


for case in ("next token", "padded batch", "next turn"):
    exact, own, mended = (answers(make(), case) for make in (DynamicCache, OwnRows, WithMask))
    print(f"{case}: logits differ by {(own - exact).abs().max():.2f}, ", end="")
    print(f"and with get_mask_sizes by {(mended - exact).abs().max():.2f}")
    assert torch.equal(mended, exact) and torch.equal(own, exact) == (case == "next token")
EOF
