#!/usr/bin/env bash
# transformers 5.24.0: generate_batch passes over every keyword but max_new_tokens, also those that
#   generate refuses, without a word.
#
# Expected: model.generate_batch(prompts, repetition_penalty=.., bad_words_ids=..) does with each prompt
#   what model.generate does, as max_new_tokens=.. has its effect there; a misspelled keyword raises,
#   as it does in generate.
# Seen: tokens are those of a call without them, the forbidden word among them. A keyword that does not
#   exist is taken, too. So an option that changes the cache would have no effect.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 psutil==7.1.3
"$place/venv/bin/python" - <<'EOF'
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
model = LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=1, eos_token_id=None)).eval()
prompt = list(range(3, 40))
model.generation_config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)


def batch(**more):
    return next(iter(model.generate_batch([prompt], **more).values())).generated_tokens


def alone(**more):
    return model.generate(torch.tensor([prompt]), **more)[0, len(prompt) :].tolist()


plain = batch()
assert plain == alone() and batch(max_new_tokens=3) == plain[:3]
for more in ({"bad_words_ids": [[plain[0]]]}, {"repetition_penalty": 50.0}):
    print(*more, "| generate changes:", alone(**more) != plain, end=" | ")
    print("generate_batch changes:", batch(**more) != plain)
    assert alone(**more) != plain and batch(**more) == plain
try:
    alone(made_up=1)
except ValueError as error:
    print("generate:", str(error).partition(" (")[0])
else:
    raise SystemExit("generate takes a keyword that does not exist")
assert batch(made_up=1) == plain
print("generate_batch takes made_up=1")
EOF
