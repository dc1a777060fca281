#!/usr/bin/env bash
# PEFT 0.21.2 (transformers 5.24.0): a mixed batch that raises leaves its adapter on the model.
#
# Expected: adapter_names= chooses adapters for one call. If that call raises, as with too little
#   memory or after Ctrl-C, the next plain call uses the active adapter again.
# Seen: the hooks that choose stay on the layers. Later calls without adapter_names answer with the
#   adapter of the failed call, without a word, and active_adapter still names the other one. A mixed
#   call that ends well takes the hooks away.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$place/venv/bin/python" - <<'EOF'
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
base = AutoModelForCausalLM.from_config(LlamaConfig(**shape, num_attention_heads=4)).eval()
lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
model = get_peft_model(base, lora, adapter_name="first")
model.add_adapter("second", lora)
model.eval()
ids = torch.arange(3, 40)[None]


def answer(**options):
    with torch.no_grad():
        return model(input_ids=ids, **options).logits


model.set_adapter("second")
second = answer()
model.set_adapter("first")
first = answer()
assert not torch.allclose(first, second)
answer(adapter_names=["second"])
assert torch.equal(answer(), first)
print("after a mixed call that ended: the active adapter answers")


def fail(*_):
    raise MemoryError("as a device would")


hook = base.lm_head.register_forward_pre_hook(fail)
try:
    answer(adapter_names=["second"])
except MemoryError as error:
    print("a mixed call raised:", error)
hook.remove()
later = answer()
print("later plain call: first", torch.equal(later, first), "| second", torch.allclose(later, second))
print("active_adapter:", model.active_adapter)
assert torch.allclose(later, second) and model.active_adapter == "first"
EOF
