#!/usr/bin/env bash
# transformers 5.24.0: with prefill_chunk_size, generate returns hidden states and attentions of the prompt's last chunk.
#
# Expected: prefill_chunk_size changes how much memory a long prompt takes, not what is returned. Hidden states and
#   attentions of the first step are those of the whole prompt, or generate refuses the two together.
# Seen: each chunk is a call of its own, and the outputs of all but the last are dropped, without a word. For a prompt
#   of 33 tokens in chunks of 16 they are those of one token, with the shape of a step that writes. A mean over
#   the prompt, or a choice of rows by the prompt's attention, is then made from its end, however short that is.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("error")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
config = LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes, **ends, attn_implementation="eager")
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(3, 64, (1, 33))


def generate(**options):
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
        **options,
    )


whole = generate()
assert whole.hidden_states[0][-1].shape[1] == whole.attentions[0][-1].shape[2] == 33
for size, last in ((11, 11), (16, 1), (20, 13), (33, 33)):
    chunked = generate(prefill_chunk_size=size)
    states, weights = chunked.hidden_states[0][-1], chunked.attentions[0][-1]
    print(f"chunks of {size}: states of {states.shape[1]} of 33 tokens, attention of {weights.shape[2]}")
    assert torch.equal(chunked.sequences, whole.sequences)
    assert states.shape[1] == weights.shape[2] == last
    assert torch.allclose(states, whole.hidden_states[0][-1][:, -last:], atol=1e-4)
EOF
