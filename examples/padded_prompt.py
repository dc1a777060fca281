"""Prefill a batch of padded prompts: our block-wise attention beside the model's own sdpa.

    python examples/padded_prompt.py --length 32768

With padding, sdpa needs a mask of ``[batch, 1, length, length]``; the retrieval cache reads the
padding as it is. Each side runs in a process of its own, so that its peak memory is its own, on
the bundled model with the same prompts, and both must give the same next-token logits.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from hf_kvret import ParisKVCache, attach
from hf_kvret.evaluation.bundled import load_bundled_model
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.tables import markdown_table


def measure(side: str, length: int) -> dict[str, object]:
    """Seconds, peak resident MB (above the loaded model's) and the last logits of one prefill."""
    model = load_bundled_model()
    torch.manual_seed(0)
    tokens = torch.randint(264, model.config.vocab_size, (2, length))
    mask = torch.ones_like(tokens)
    mask[1, : length // 4] = 0
    cache = None
    if side == "block-wise":
        attach(model)
        cache = ParisKVCache(model.config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    with torch.inference_mode():
        logits = model(
            tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "peak_mb": (peak - before) / 1024, "logits": logits.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the longer prompt")
    parser.add_argument("--side", choices=("block-wise", "sdpa"), help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    if options.length < 4096:
        parser.error(f"--length {options.length}: both sides use sdpa below 4096 tokens")
    if options.side:
        print(json.dumps(measure(options.side, options.length)))
        return
    sides = {}
    for side in ("block-wise", "sdpa"):
        print(f"{side} ...", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--side", side, "--length", str(options.length)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{side} ended with {done.returncode}: {done.stderr[-500:]}")
        sides[side] = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = (torch.tensor(sides[side].pop("logits")) for side in ("block-wise", "sdpa"))
    difference = float((ours - theirs).abs().max())
    rows = [
        (side, f"{result['seconds']:.1f}", f"{result['peak_mb']:.0f}")
        for side, result in sides.items()
    ]
    print(markdown_table(("attention", "seconds", "peak MB above the model's"), rows))
    print(f"\nlargest difference of a logit: {difference:.1e}")
    if difference > 1e-3:
        raise SystemExit("the two sides disagree: nothing is reported")
    if options.json:
        result = {"length": options.length, "batch": 2, "difference": difference, "sides": sides}
        with open(options.json, "w") as file:
            json.dump(result | {"environment": describe_environment()}, file, indent=1)


if __name__ == "__main__":
    main()
