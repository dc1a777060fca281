"""Train the small Llama that ships with hf_kvret, on one core of a CPU.

    python examples/train_needle_model.py --out first
    python examples/train_needle_model.py --resume first --out needle-llama \\
        --tokens 2e6 --lr 3e-4 --threads 2

The model learns the needle language of ``hf_kvret.lab.evaluate.needles``: read a long document
of noise, answer questions about the needles in it. Everything that is random comes from one
seed, and every decision (next stage, end of training) from counts of tokens and answers, never
from the clock: the same machine, thread count and library versions give the same weights.

Four things make recall form quickly and reach far beyond the training lengths:

* a start near the solution (``start_near_recall``): heads that look one and two tokens back, heads
  that look for tokens with the same predecessors;
* a curriculum: 6 needles in 128 tokens first, 32 in 2,048 last, the next stage once 97% of the
  answers are right;
* a loss on the answers, plus a little language-model loss on everything;
* random jumps in the position ids between segments (up to 131,072 in all), so that the model
  sees large distances without long sequences.
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

from hf_kvret.lab.evaluate.needles import NeedleLanguage

MAX_POSITION = 131_072
LM_LOSS_WEIGHT = 0.05


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        length: tokens of a row.
        needles: needles in its document, each asked once.
        batch: rows of a batch.
        jump: the most that all jumps in a row's positions add up to.
    """

    length: int
    needles: int
    batch: int
    jump: int = 0


CURRICULUM = (
    Stage(128, 6, 12),
    Stage(256, 16, 8, jump=2_048),
    Stage(512, 24, 6, jump=16_384),
    Stage(1024, 32, 4, jump=MAX_POSITION),
    Stage(2048, 32, 2, jump=MAX_POSITION),
)

# A second run on long rows: among tens of thousands of tokens, heads must be sharper than among
# two thousand.
LONG_ROWS = (
    Stage(2048, 32, 2, jump=MAX_POSITION),
    Stage(4096, 48, 1, jump=MAX_POSITION),
    Stage(8192, 64, 1, jump=MAX_POSITION),
    Stage(16_384, 96, 1, jump=MAX_POSITION),
)
LOOK_BACK_GAIN = 1.3


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
    keys, values = language.pairs(rng, stage.needles)
    turn_len = keys.shape[1] + 2 + values.shape[1]
    body_len = stage.length - stage.needles * turn_len
    body, starts = language.document(rng, body_len, keys, values)
    order = rng.permutation(stage.needles)
    turns = np.concatenate([language.questions(keys[order]), values[order]], axis=1)
    tokens = np.concatenate([body, turns.reshape(-1)])
    is_answer = np.zeros(stage.length, dtype=bool)
    answers = is_answer[body_len:].reshape(-1, turn_len)
    answers[:, -values.shape[1] :] = True
    question_starts = np.arange(body_len, stage.length, turn_len)
    needle_ends = starts + turn_len - 1
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
    """Weights from which recall forms within a minute, where noise takes hours.

    The residual stream is divided: embeddings in the first half, copies of the previous token and
    of the one before in the second, and one coordinate that is the same for every token, which is
    what a head without biases needs to attend by position. The first layer's heads start out
    looking 1, 2, 3 and 1 tokens back and copy what they see; the heads of the other layers start
    with equal queries and keys that read the copies, so that a token attends to tokens with the
    same two predecessors, and write back what they find there. Everything is trained from there.
    """
    config = model.config
    width, dim = config.hidden_size, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    half, constant = width // 2, width - 1
    copies = (slice(half, half + dim), slice(half + dim, width - 2))
    scale = config.initializer_range
    embedding = torch.zeros(config.vocab_size, width)
    embedding[:, :half] = scale * torch.randn(config.vocab_size, half)
    model.lm_head.weight.copy_(embedding + 0.005 * torch.randn_like(embedding))
    embedding[:, constant] = 0.5 * scale * half**0.5
    model.model.embed_tokens.weight.copy_(embedding)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(attention, projection).weight.normal_(0.0, 0.01)
        layer.mlp.down_proj.weight.normal_(0.0, 0.01)
        for head in range(config.num_key_value_heads):
            rows = slice(head * dim, (head + 1) * dim)
            read = torch.linalg.qr(torch.randn(half, dim)).Q.T
            attention.v_proj.weight[rows, :half] += read
            if number > 0:
                similar = torch.zeros(dim, width)
                similar[:, half : width - 2] = 0.05 * torch.randn(dim, width - 2 - half)
                # The fast coordinates of the rotary embedding tell little at a distance.
                similar.view(2, dim // 2, width)[:, :8] *= 0.3
                attention.k_proj.weight[rows] += similar
                for query in range(head * group, (head + 1) * group):
                    columns = slice(query * dim, (query + 1) * dim)
                    attention.q_proj.weight[columns] += similar
                    attention.o_proj.weight[:half, columns] += 0.1 * read.T
        if number == 0:
            _look_back(attention, embedding, constant, offsets=(1, 2, 3, 1))
            for head, target in enumerate(copies):
                columns = slice(head * dim, (head + 1) * dim)
                size = target.stop - target.start
                attention.o_proj.weight[target, columns] += 0.1 * torch.eye(dim)[:size]


def _look_back(
    attention: torch.nn.Module, embedding: torch.Tensor, constant: int, offsets: tuple[int, ...]
) -> None:
    """Make query head h of a first layer attend ``offsets[h]`` tokens back, through RoPE."""
    config = attention.config
    dim, half = config.head_dim, config.head_dim // 2
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    # Six fast frequencies single out one offset; together they make a logit of 30.
    shares = torch.zeros(half)
    shares[:6] = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]) / 12
    normalized = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
    strength = (30.0 * dim**0.5 * shares).sqrt() / normalized[:, constant].mean()
    for head in range(config.num_key_value_heads):
        attention.k_proj.weight[head * dim : head * dim + half, constant] += strength
    for head, offset in enumerate(offsets):
        start = head * dim
        cosine, sine = torch.cos(offset * angles), torch.sin(offset * angles)
        attention.q_proj.weight[start : start + half, constant] += strength * cosine
        attention.q_proj.weight[start + half : start + dim, constant] -= strength * sine


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, language: NeedleLanguage, length: int, seed: int, needles: int = 128
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


def learn(
    model: LlamaForCausalLM, rng: np.random.Generator, args: argparse.Namespace
) -> list[dict[str, int]]:
    """Train for ``args.tokens`` tokens; returns when each stage was passed.

    A first run climbs the curriculum; a run that continues one mixes long rows.
    """
    language, stages = NeedleLanguage(), LONG_ROWS if args.resume else CURRICULUM
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    budget, seen, current, average = int(args.tokens), 0, 0, 0.0
    annealed = 1.0 if args.resume else 0.2
    passed: list[dict[str, int]] = []
    with tqdm(total=budget, unit="tok", unit_scale=True, mininterval=5) as progress:
        while seen < budget:
            index = current
            if args.resume:
                index = int(rng.integers(len(stages)))
            elif current > 1 and rng.random() < 0.2:
                # Older stages come back now and then, so that nothing learnt is lost.
                index = int(rng.integers(1, current))
            stage = stages[index]
            annealing = min(1.0, (budget - seen) / (annealed * budget))
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
            seen += stage.batch * stage.length
            progress.update(stage.batch * stage.length)
            if args.resume or index == current:
                average = 0.95 * average + 0.05 * right
            if not args.resume and average > 0.97 and current + 1 < len(stages):
                passed.append({"stage": current, "tokens": seen})
                current, average = current + 1, 0.0
            progress.set_postfix(stage=current, right=f"{average:.3f}", loss=f"{loss:.3f}")
    return passed


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(args.seed)
    language, started = NeedleLanguage(), time.time()
    if args.resume:
        model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32).train()
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(LOOK_BACK_GAIN)
    else:
        model = build_model(language)
    passed = learn(model, rng, args)
    model.eval().to(torch.bfloat16).save_pretrained(args.out)
    model.float()
    report = {f"answers right at {n}": evaluate(model, language, n, seed=1) for n in args.eval}
    report |= {"minutes": round((time.time() - started) / 60, 1), "stages passed": passed}
    Path(args.out, "training.json").write_text(json.dumps(vars(args) | report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="needle-llama", help="folder for weights and config")
    parser.add_argument("--resume", help="go on from this folder's weights, on long rows")
    parser.add_argument("--tokens", type=float, default=8e6, help="training tokens in all")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--eval", type=int, nargs="*", default=[4096, 16384, 32768], help="document lengths"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
