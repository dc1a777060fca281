#!/usr/bin/env bash
# transformers 5.24.0: `transformers serve` takes temperature and top_p, and answers greedily.
#
# Expected: a request with temperature 1.9 is sampled at that temperature, as OpenAI's API says, so
#   that two seeds give two answers. frequency_penalty counts the tokens of the answer.
# Seen: do_sample is left to the model's generation_config, where nothing means greedy; temperature,
#   top_p and seed then do nothing, and every seed gives the same answer. frequency_penalty=1
#   becomes a repetition_penalty of 2, which counts the tokens of the prompt, too.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    fastapi==0.165.0 uvicorn==0.54.0 openai==3.57.0
PLACE=$place "$place/venv/bin/python" - <<'EOF'
import json
import os
import socket
import time
from urllib.request import Request, urlopen

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cli.serve import Serve

folder = os.environ["PLACE"] + "/model"
letters = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz")}
raw = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?").save_pretrained(folder)
shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=27, **shape, num_attention_heads=4, eos_token_id=None)
LlamaForCausalLM(config).save_pretrained(folder)
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
server = Serve(folder, non_blocking=True, host="127.0.0.1", port=port, device="cpu")


def ask(**more):
    body = json.dumps({"prompt": "the quick brown fox", "max_tokens": 20, **more}).encode()
    url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    text = json.load(urlopen(Request(url, body, kind)))["choices"][0]["text"]
    print(more, repr(text), flush=True)
    return text


while socket.socket().connect_ex(("127.0.0.1", port)):
    time.sleep(0.2)
hot, own = {"temperature": 1.9, "top_p": 1.0}, json.dumps({"do_sample": True, "max_new_tokens": 20})
same = {ask(seed=seed, **hot) for seed in range(4)} == {ask()}
sampled = len({ask(seed=seed, generation_config=own, **hot) for seed in range(4)}) > 1
os._exit(0 if same and sampled else 1)
EOF
