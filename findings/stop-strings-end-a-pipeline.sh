#!/usr/bin/env bash
# transformers 5.24.0: a pipeline refuses stop strings, although it has the tokenizer.
#
# Expected: a text-generation pipeline passes on keywords of generate, and it has a tokenizer. So
#   stop_strings= works, and so does a model whose generation configuration names stop strings.
# Seen: both raise ValueError, which asks for the tokenizer. The pipeline passes it on for
#   stop_sequence= alone, its own name for the same. tokenizer= beside stop_strings= helps, too.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'EOF'
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
spelled = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
spelled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
spelled.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelled)
torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **shape)
model = LlamaForCausalLM(config).eval()
answer = pipeline("text-generation", model=model, tokenizer=tokenizer)


def outcome(**keywords):
    try:
        answer("A question", max_new_tokens=3, do_sample=False, **keywords)
    except ValueError as error:
        return str(error).rpartition("but ")[2].partition(".")[0]
    return "answered"


seen = [
    outcome(),
    outcome(stop_strings=["Z"]),
    outcome(stop_sequence="Z"),
    outcome(stop_strings=["Z"], tokenizer=tokenizer),
]
model.generation_config.stop_strings = ["Z"]
seen.append(outcome())
print("\n".join(seen))
refused = "we could not locate a tokenizer"
assert seen == ["answered", refused, "answered", "answered", refused]
EOF
