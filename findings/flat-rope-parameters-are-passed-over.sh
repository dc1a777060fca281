#!/usr/bin/env bash
# transformers 5.24.0: rope_parameters as they are written for most models are passed over by models
#   whose layers differ, as Gemma-3 and OLMo-3, without a word.
#
# Expected: rope_parameters={"rope_type": "yarn", ..} extends the context of any model that has RoPE, as
#   it does that of Llama and Qwen3; or it raises where the model wants them by type of layer.
# Seen: config.rope_parameters shows the yarn that was given, beside an entry for each type of layer with
#   the defaults. Only these are used, and logits are equal to the last bit. The same under the key
#   "full_attention" changes them. So a context that was meant to be four times as long is not.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import warnings

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Olmo3Config, Qwen3Config
from transformers.utils import logging

shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
ends = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256}
yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
yarn |= {"original_max_position_embeddings": 64}
ids = torch.arange(3, 120)[None]


def logits(config_class, **options):
    torch.manual_seed(0)
    config = config_class(**shape, **heads, **ends, **options)
    with torch.no_grad():
        return AutoModelForCausalLM.from_config(config).eval()(ids).logits


warnings.simplefilter("error")
logging.set_verbosity_warning()
for config_class in (LlamaConfig, Qwen3Config, Gemma3TextConfig, Olmo3Config):
    plain, flat = logits(config_class), logits(config_class, rope_parameters=dict(yarn))
    change = (plain - flat).abs().max().item()
    print(f"{config_class.__name__}: a flat yarn changes logits by {change:.4f}", end="")
    by_type = config_class().rope_parameters
    if "full_attention" not in by_type:
        print()
        assert change > 1e-3
        continue
    own = logits(config_class, rope_parameters=by_type | {"full_attention": dict(yarn)})
    change_by_type = (plain - own).abs().max().item()
    print(f", one for full_attention by {change_by_type:.4f}")
    assert change == 0 and change_by_type > 1e-3
EOF
