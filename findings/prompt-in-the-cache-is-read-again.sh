#!/usr/bin/env bash
# transformers 5.24.0: generate reads a prompt again that its cache holds already, and the text is another one.
#
# Expected: generate takes the whole prompt and a cache of its first tokens, and reads what is missing. Where nothing
#   is missing it steps back by one token, or raises. The same for a second try with the cache of the first.
# Seen: what is missing is the slice [-count:] of the prompt. A count of 0 is all of it: the prompt is read a second
#   time, at its own positions, behind itself. Where the cache holds an answer, too, the count is negative, and the
#   end of the prompt is read behind that answer. A cache that lacks one token gives the right text, and so does one
#   that is taken back to that: cache.crop(-1), or by the answer and one token.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import warnings

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

warnings.simplefilter("error")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes, **ends)).eval()
prompt = torch.randint(3, 64, (1, 12))
COUNT = 8


def answer(cache):
    held = cache.get_seq_length()
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), cache=cache, max_new_tokens=COUNT, do_sample=False
    )
    read = cache.get_seq_length() - held - (COUNT - 1)
    return text[0, prompt.shape[1] :].tolist(), read


def read_first(count):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt[:, :count], cache=cache)
    return cache


used, cropped, taken_back = DynamicCache(config=model.config), read_first(12), DynamicCache(config=model.config)
right, _ = answer(used)
answer(taken_back)
cropped.crop(-1)
taken_back.crop(-COUNT)  # 7 tokens of the answer, and one of the prompt
cases = {
    "a cache of 11 of its 12 tokens": (read_first(11), 1, True),
    "a cache of all 12": (read_first(12), 12, False),
    "a cache of all 12, cropped by one": (cropped, 1, True),
    "the cache of a first try": (used, 5, False),
    "the cache of a first try, taken back": (taken_back, 1, True),
}
for name, (cache, expected_read, expected_right) in cases.items():
    text, read = answer(cache)
    print(f"{name}: {read} of the prompt read, the text is {'right' if text == right else 'another one'}")
    assert (read, text == right) == (expected_read, expected_right)
EOF
