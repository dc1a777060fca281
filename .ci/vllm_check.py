"""What ``.ci/vllm`` runs in an environment with vLLM: ``python .ci/vllm_check.py``.

vLLM's tokens with our attention must be those of our own caches in transformers: ragged requests,
twice, so that the second time finds its prompts in vLLM's prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
POSITIONS = {"max_position_embeddings": 2048, "vocab_size": 264}
WINDOW = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 1}
COVERING, SMALL = {**WINDOW, "top_k": 10**6}, {**WINDOW, "top_k": 32}
# Prompts of the second round end within the window of the first round's answers.
WIDE = {**COVERING, "recent": 64, "flush": 8}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
NEW_TOKENS = 16


NONE: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """A run of vLLM: the method and its options, and arguments of ``LLM``."""

    name: str
    method: str
    options: Mapping[str, Any]
    arguments: Mapping[str, Any] = NONE
    model: str = "llama"
    refusal: str = ""


# The prompts take 30 of 31 blocks, and each request needs another one while it decodes.
TINY_POOL = {"num_gpu_blocks_override": 32, "block_size": 32, "max_model_len": 352}
CASES = (
    Case("flat, covering", "flat", COVERING),
    Case("paris, covering", "paris", COVERING),
    Case("flat, 32 rows", "flat", SMALL),
    Case("paris, 32 rows", "paris", SMALL),
    Case("paris, window moves by 8", "paris", {**COVERING, "flush": 8}),
    Case("paris, prompts in chunks", "paris", SMALL, {"max_num_batched_tokens": 128}),
    Case("paris, preempted requests", "paris", COVERING, TINY_POOL),
    Case("paris, short questions to a document", "paris", WIDE),
    Case("paris, 2 ranks", "paris", SMALL, {"tensor_parallel_size": 2}),
    Case("latent attention", "paris", SMALL, NONE, "deepseek_v2", "selects rows on CPU_ATTN"),
    Case(
        "a store of ours", "paris", {"store": "host"}, NONE, "llama", "store is of a cache of our"
    ),
    Case("lrqk", "lrqk", SMALL, NONE, "llama", "decode steps of vLLM select by flat or paris"),
)


def prompts() -> list[list[int]]:
    """Token ids of three ragged requests."""
    return [[(7 * i + 3 * j) % 250 + 4 for i in range(300 + 10 * j)] for j in range(3)]


def named(method: str, options: Mapping[str, Any]) -> str:
    """The text of ``HF_KVRET_VLLM``."""
    return ":".join([method, *(f"{name}={value}" for name, value in options.items())])


def make_models(folder: Path) -> None:
    """Save a small model for the cases, and one of latents."""
    from hf_kvret.testing import LATENT_MODELS, TinyModel
    from hf_kvret.testing.models import small_config

    small = small_config("llama", **SIZES, **POSITIONS, num_hidden_layers=3)
    TinyModel("llama", small, (0, 1, 2)).build().save_pretrained(folder / "llama")
    LATENT_MODELS["deepseek_v2"].build().save_pretrained(folder / "deepseek_v2")


def expected(folder: Path) -> dict[str, list[list[int]]]:
    """By case, the tokens of our caches in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    import hf_kvret

    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).eval()
    run = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    texts = {}
    for case in CASES:
        if case.refusal:
            continue
        cls = hf_kvret.registry.registered_methods()[case.method]
        options = {**case.options, **({"center": False} if case.method == "paris" else {})}
        texts[case.name] = []
        for ids in prompts():
            cache = cls(model.config, **options)
            text = model.generate(torch.tensor([ids]), past_key_values=cache, **run)
            texts[case.name].append(text[0, len(ids) :].tolist())
    return texts


def run_vllm(folder: Path, model: str, arguments: dict[str, Any]) -> None:
    """In a process of its own: print as JSON the tokens of two rounds and how many requests were
    preempted."""
    from vllm import LLM, SamplingParams

    usual = {"max_model_len": 1024, "max_num_seqs": 4}
    llm = LLM(
        str(folder / model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **{**usual, **arguments},
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )

    def generate(texts: list[list[int]]) -> list[list[int]]:
        results = llm.generate([{"prompt_token_ids": ids} for ids in texts], sampling)
        return [list(one.outputs[0].token_ids) for one in results]

    texts = [generate(prompts()), generate(prompts())]
    counters = [one for one in llm.get_metrics() if one.name == "vllm:num_preemptions"]
    print(json.dumps([texts, sum(one.value for one in counters)]))


def in_process(folder: Path, model: str, arguments: Mapping[str, Any], text: str) -> Any:
    """What ``run_vllm`` prints, or the end of an error."""
    command = [sys.executable, __file__, str(folder), model, json.dumps(dict(arguments))]
    environment = {**os.environ, **ENVIRONMENT, "HF_KVRET_VLLM": text}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if ended.returncode == 0:
        return json.loads(ended.stdout.strip().splitlines()[-1])
    return ended.stdout + ended.stderr


def check_cases(folder: Path) -> int:
    """Print a line a case; the number of those that failed."""
    texts, failed = expected(folder), 0
    for case in CASES:
        found = in_process(folder, case.model, case.arguments, named(case.method, case.options))
        if case.refusal:
            good, what = case.refusal in str(found), "refused at the start"
        else:
            good, what = _is_good(case, found, texts[case.name]), "transformers' tokens, twice"
        failed += not good
        print(f"{'ok    ' if good else 'FAILED'}  {case.name}: {what}", flush=True)
        if not good:
            print(f"        {str(found)[-3000:]}")
    return failed


def _is_good(case: Case, found: Any, texts: list[list[int]]) -> bool:
    if isinstance(found, str) or found[0] != [texts] * 2:
        return False
    return (found[1] > 0) == (case.arguments == TINY_POOL)


def main() -> int:
    """The exit status: 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("one", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder, model, arguments = options.one
        run_vllm(Path(folder), model, json.loads(arguments))
        return 0
    # Nothing here runs it, but vLLM's own classes are those that it is made for.
    import hf_kvret.vllm.cuda  # noqa: F401

    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_models(folder)
        return min(1, check_cases(folder))


if __name__ == "__main__":
    sys.exit(main())
