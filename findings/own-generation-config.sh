#!/usr/bin/env bash
# transformers 5.24.0: a GenerationConfig that you pass to generate() is filled from the model's.
#
# Expected: generate(ids, generation_config=GenerationConfig(max_new_tokens=8)) answers greedily,
#   with the library's defaults, whatever the model's author put into generation_config.json.
# Seen: each field that you did not set yourself is taken from model.generation_config. Here that is
#   a beam search of three and a repetition penalty; nothing is logged. So two models that get the
#   same config object are not asked the same. num_beams=1 and repetition_penalty=1.0 have to be
#   written out.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

torch.manual_seed(0)
shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
config = LlamaConfig(**shape, num_attention_heads=4, initializer_range=0.3, eos_token_id=None)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(3, 40)[None]
more = {"return_dict_in_generate": True, "pad_token_id": 0}
mine = GenerationConfig(max_new_tokens=8, do_sample=False, **more)

plain = model.generate(ids, generation_config=mine)
model.generation_config.num_beams = 3
model.generation_config.repetition_penalty = 2.0
filled = model.generate(ids, generation_config=mine)
full = {"num_beams": 1, "repetition_penalty": 1.0}
written = GenerationConfig(max_new_tokens=8, do_sample=False, **full, **more)
explicit = model.generate(ids, generation_config=written)

for name, result in (("before", plain), ("the same config", filled), ("written out", explicit)):
    print(f"{name:16} {type(result).__name__:32} {result.sequences[0, 37:].tolist()}")
assert "Beam" in type(filled).__name__ and "Beam" not in type(plain).__name__
assert torch.equal(plain.sequences, explicit.sequences)
EOF
