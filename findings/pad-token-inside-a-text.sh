#!/usr/bin/env bash
# transformers 5.24.0: a pad token that the model itself wrote is masked in the next turn.
#
# Expected: generate guesses a missing attention_mask from padding at the edge of a prompt. A token in
#   the middle of a conversation is a token, also where its id is that of padding.
# Seen: every place with that id is masked, also between others, where pad_token_id is not one of the
#   end tokens. If the first turn wrote that id, the second turn, given the whole conversation, neither
#   attends to it nor counts its position, and its text is another one. A mask of ones is needed.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
config = LlamaConfig(
    **shape, num_attention_heads=4, initializer_range=0.25, pad_token_id=0, eos_token_id=1
)
model = AutoModelForCausalLM.from_config(config).eval()
# Sampling that ends nowhere, until the model has written the id of padding by itself.
question = torch.arange(2, 20)[None]
for seed in range(100):
    torch.manual_seed(seed)
    ones = torch.ones_like(question)
    options = {"do_sample": True, "min_new_tokens": 12, "max_new_tokens": 12}
    first = model.generate(question, attention_mask=ones, **options)
    if (first[0, question.shape[1] : -1] == 0).any():
        break
print("first turn:", first[0, question.shape[1] :].tolist())
talk = torch.cat([first, question[:, :3]], dim=1)
with_mask = model.generate(
    talk, attention_mask=torch.ones_like(talk), do_sample=False, max_new_tokens=8
)
without = model.generate(talk, do_sample=False, max_new_tokens=8)
print("second turn, a mask of ones:", with_mask[0, talk.shape[1] :].tolist())
print("second turn, no mask:       ", without[0, talk.shape[1] :].tolist())
guessed = model.generate(
    talk, attention_mask=(talk != 0).long(), do_sample=False, max_new_tokens=8
)
assert torch.equal(without, guessed) and not torch.equal(without, with_mask)
print("no mask is a mask of zeros wherever the id stands")
EOF
