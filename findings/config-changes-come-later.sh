#!/usr/bin/env bash
# transformers 5.24.0: a change of model.config does nothing now, and changes the model when reloaded.
#
# Expected: model.config.num_experts_per_tok = 4 has the model route to four experts from now on, or
#   raises; and a model that is saved and loaded answers as before.
# Seen: the routers and the norms copied their numbers when they were made, so that logits are equal
#   to the last bit. save_pretrained writes the changed config, and the reloaded model computes
#   something else. An ablation over such a field in one process compares a model with itself.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
PLACE=$place "$place/venv/bin/python" - <<'EOF'
import os

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ids = torch.arange(3, 40)[None]
for name, value in (("num_experts_per_tok", 4), ("norm_topk_prob", True), ("rms_norm_eps", 0.1)):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape, **experts, **heads)).eval()
    with torch.no_grad():
        before = model(ids).logits
        setattr(model.config, name, value)
        changed = model(ids).logits
        model.save_pretrained(os.environ["PLACE"] + "/model")
        again = AutoModelForCausalLM.from_pretrained(os.environ["PLACE"] + "/model").eval()
        reloaded = again(ids).logits
    differences = [(before - one).abs().max().item() for one in (changed, reloaded)]
    print(f"{name} = {value}: logits change by {differences[0]}, once reloaded by {differences[1]:.4f}")
    assert differences[0] == 0 and differences[1] > 1e-3
EOF
