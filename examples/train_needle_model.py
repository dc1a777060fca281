"""Train the small Llama that ships with hf_kvret, from nothing, on a CPU.

    python examples/train_needle_model.py --out needle-llama

The model learns the needle language of ``hf_kvret.evaluation.needles``: read a long document
of noise, answer questions about the needles in it. Everything that is random comes from one
seed, and every decision (next stage, end of training) from counts of tokens and answers, never
from the clock: the same machine, thread count and library versions give the same weights.

Three things make recall form quickly and reach far beyond the training lengths:

* a curriculum: one-token keys in 128 tokens first, two-token keys in 2,048 tokens last, the
  next stage once 97% of the answers are right;
* a loss on the answers, plus a little language-model loss on everything;
* random jumps in the position ids between segments (up to 131,072 in all, in the later stages),
  so that the model sees large distances without long sequences.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvret.evaluation.needles import NeedleLanguage

MAX_POSITION = 131_072
LM_LOSS_WEIGHT = 0.05


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        length: tokens of a row.
        needles: needles in its document.
        key_len: tokens of a key.
        batch: rows of a batch.
        asks: how often each needle is asked for.
        jump: the most that all jumps in a row's positions add up to.
    """

    length: int
    needles: int
    key_len: int
    batch: int
    asks: int = 1
    jump: int = 0


CURRICULUM = (
    Stage(64, 3, 1, 24, asks=2),
    Stage(128, 8, 1, 16),
    Stage(256, 16, 2, 8, jump=2_048),
    Stage(512, 24, 2, 6, jump=16_384),
    Stage(1024, 32, 2, 4, jump=MAX_POSITION),
    Stage(2048, 32, 2, 2, jump=MAX_POSITION),
)


def jumping_positions(
    rng: np.random.Generator, length: int, boundaries: np.ndarray, most: int
) -> np.ndarray:
    """Position ids ``[length]`` that jump ahead at some boundaries, by ``most`` in all.

    A quarter of the rows has no jumps. In the others the sum of the jumps is log-uniform, so
    that short and long distances are equally common.
    """
    steps = np.ones(length, dtype=np.int64)
    steps[0] = 0
    if most == 0 or rng.random() < 0.25:
        return np.cumsum(steps)
    total = int(np.exp(rng.uniform(0.0, np.log(min(most, MAX_POSITION - length)))))
    chosen = rng.random(len(boundaries)) < rng.uniform(0.1, 1.0)
    if chosen.any():
        share = rng.dirichlet(np.full(int(chosen.sum()), 0.5))
        steps[boundaries[chosen]] += np.floor(share * total).astype(np.int64)
    return np.cumsum(steps)


def make_row(
    rng: np.random.Generator, language: NeedleLanguage, stage: Stage
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, position ids and the answer mask (true where a token is part of an answer)."""
    keys, values = language.pairs(rng, stage.needles, stage.key_len)
    turn_len = stage.key_len + 2 + language.value_len
    turns_len = stage.needles * stage.asks * turn_len
    body_len = stage.length - turns_len
    body, starts = language.document(rng, body_len, keys, values)
    order = np.concatenate([rng.permutation(stage.needles) for _ in range(stage.asks)])
    turns = np.concatenate([language.questions(keys[order]), values[order]], axis=1)
    tokens = np.concatenate([body, turns.reshape(-1)])
    is_answer = np.zeros(stage.length, dtype=bool)
    answers = is_answer[body_len:].reshape(-1, turn_len)
    answers[:, -language.value_len :] = True
    question_starts = np.arange(body_len, stage.length, turn_len)
    needle_ends = starts + 1 + stage.key_len + language.value_len
    boundaries = np.unique(np.concatenate([starts, needle_ends, question_starts]))
    boundaries = boundaries[boundaries < stage.length]
    positions = jumping_positions(rng, stage.length, boundaries, stage.jump)
    return tokens, positions, is_answer


def make_batch(
    rng: np.random.Generator, language: NeedleLanguage, stage: Stage
) -> tuple[torch.Tensor, ...]:
    rows = [make_row(rng, language, stage) for _ in range(stage.batch)]
    return tuple(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))


def losses(
    model: LlamaForCausalLM, tokens: torch.Tensor, positions: torch.Tensor, answers: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The training loss and the share of answer tokens that are predicted right.

    The explicit all-ones mask keeps transformers from taking a jump for a packed sequence.
    """
    output = model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=torch.ones_like(tokens),
        use_cache=False,
    )
    logits, targets, counted = output.logits[:, :-1], tokens[:, 1:], answers[:, 1:]
    token_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)
    right = (logits[counted].argmax(-1) == targets[counted]).float().mean().item()
    return token_loss[counted].mean() + LM_LOSS_WEIGHT * token_loss.mean(), right


def build_model(language: NeedleLanguage) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=language.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        pad_token_id=language.pad,
        bos_token_id=language.bos,
        eos_token_id=None,
        initializer_range=0.06,
    )
    model = LlamaForCausalLM(config)
    start_near_recall(model)
    return model


@torch.no_grad()
def start_near_recall(model: LlamaForCausalLM) -> None:
    """Weights from which recall forms several times sooner than from independent noise.

    After "Mimetic initialization of self-attention layers" (Trockman and Kolter, 2023): queries
    and keys of a group start equal, so that a token attends to tokens like it, and what a head
    reads it writes back unchanged. All embeddings share a constant part, which is what a head
    without biases needs to attend by position; the output starts as the embedding.
    """
    config = model.config
    dim, kv_dim = config.head_dim, config.num_key_value_heads * config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    embedding = model.model.embed_tokens.weight
    embedding += torch.randn(config.hidden_size) * config.initializer_range
    model.lm_head.weight.copy_(embedding)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        value = torch.nn.init.orthogonal_(torch.empty(kv_dim, config.hidden_size))
        attention.v_proj.weight.copy_(value)
        heads = value.view(-1, dim, config.hidden_size).repeat_interleave(group, dim=0)
        attention.o_proj.weight.copy_(0.5 * heads.reshape(-1, config.hidden_size).T)
        if number > 0:
            key = torch.randn(kv_dim, config.hidden_size) * 0.045
            attention.k_proj.weight.copy_(key)
            heads = key.view(-1, dim, config.hidden_size).repeat_interleave(group, dim=0)
            attention.q_proj.weight.copy_(heads.reshape(-1, config.hidden_size))


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, language: NeedleLanguage, length: int, seed: int, needles: int = 64
) -> float:
    """Share of two-token answers that are right in one document of ``length`` tokens."""
    rng = np.random.default_rng(seed)
    keys, values = language.pairs(rng, needles)
    document, _ = language.document(rng, length, keys, values)
    cache = model(torch.from_numpy(document)[None], logits_to_keep=1).past_key_values
    right = 0
    for prompt, value in zip(language.questions(keys), values, strict=True):
        turn = torch.from_numpy(np.concatenate([prompt, value[:1]]))[None]
        logits = model(turn, past_key_values=cache, logits_to_keep=2).logits[0]
        right += bool((logits.argmax(-1).numpy() == value).all())
        cache.crop(-turn.shape[1])
    return right / needles


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(args.seed)
    language = NeedleLanguage()
    model = build_model(language)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    budget = int(args.tokens)
    seen, stage_index, average, started = 0, 0, 0.0, time.time()
    log = []
    with tqdm(total=budget, unit="tok", unit_scale=True, mininterval=5) as progress:
        while seen < budget:
            # Older stages come back now and then, so that nothing learnt is lost.
            revisit = stage_index > 2 and rng.random() < 0.2
            index = int(rng.integers(2, stage_index)) if revisit else stage_index
            stage = CURRICULUM[index]
            annealing = min(1.0, (budget - seen) / (0.2 * budget))
            warming = min(1.0, (seen + 1) / 150_000)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * annealing * warming
            batch = make_batch(rng, language, stage)
            with torch.autocast("cpu", torch.bfloat16):
                loss, right = losses(model, *batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            size = stage.batch * stage.length
            seen += size
            progress.update(size)
            if index == stage_index:
                average = 0.95 * average + 0.05 * right
                if average > 0.97 and stage_index + 1 < len(CURRICULUM):
                    log.append({"stage": stage_index, "tokens": seen})
                    stage_index, average = stage_index + 1, 0.0
            progress.set_postfix(stage=stage_index, right=f"{average:.3f}", loss=f"{loss:.3f}")
    model.eval()
    report = {f"answers right at {n}": evaluate(model, language, n, seed=1) for n in args.eval}
    report |= {"tokens": seen, "minutes": round((time.time() - started) / 60, 1), "stages": log}
    model.to(torch.bfloat16).save_pretrained(args.out)
    Path(args.out, "training.json").write_text(json.dumps(vars(args) | report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="needle-llama", help="folder for weights and config")
    parser.add_argument("--tokens", type=float, default=16e6, help="training tokens in all")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--eval", type=int, nargs="*", default=[4096, 16384, 32768], help="document lengths"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
