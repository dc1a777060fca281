"""The training that the small models of real text share: rates, checkpoints, the report.

A script says with a ``Recipe`` what it trains, and on what. What is learnt is repeatable: one seed,
and every decision is made from counts, never from the clock. A run that is interrupted goes on from
its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from reference_data import SOURCES, encode_texts, train_tokenizer
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

TOKENIZER = Path(__file__).parent / "reference_llama"
TEXT_ROW = 512
ANSWER_WEIGHT = 2.0
# Learning rates under AdamW: of embeddings and attention; of the output matrix and the norms.
DESIGNED_LR, OUTPUT_LR = 1e-3, 1e-3
PASSED = 0.85
CHECKPOINT_EVERY = 200


@dataclass
class Progress:
    """How far training is; what a checkpoint holds beside weights and random states."""

    tokens: int = 0
    steps: int = 0
    stage: int = 0
    right: float = 0.0
    text_loss: float = 9.0
    seconds: float = 0.0
    passed: list[dict[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What a step learns from: ``batches`` batches of needle documents of ``stage``, or of plain
    text where that is None; all but answers weighs ``text_weight``."""

    stage: int | None
    batches: int
    text_weight: float = 1.0


class Source(Protocol):
    """Where ``learn`` takes batches from. A checkpoint holds its ``state_dict``."""

    # Stages of needle documents: the next one begins when the share PASSED of the answer tokens is
    # right. None of them where there is plain text only.
    stages: int

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: dict[str, np.ndarray], seed: int
    ) -> None: ...

    def choose(self, progress: Progress) -> Step: ...

    def draw(self, stage: int | None) -> tuple[torch.Tensor, ...]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """What differs between the models that learn here.

    Attributes:
        build: makes the model that starts, of the tokenizer.
        batches: where batches come from.
        own_tokenizer: whether to train a tokenizer; the reference model's is taken otherwise.
        sources: shares of the training tokens.
        unread: whether to take text that the other models have not read, see ``encode_texts``.
        text_tokens: tokens of text to draw from at least, however few are learnt from.
        muon: parts of the names of matrices that Muon trains.
        embedding_lr: learning rate under AdamW of embeddings, and of attention if not under Muon.
        held_out_rows: lengths of rows of held-out text.
    """

    build: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    batches: type[Source]
    own_tokenizer: bool = False
    sources: Mapping[str, float] = field(default_factory=lambda: SOURCES)
    unread: bool = False
    text_tokens: int = 0
    muon: tuple[str, ...] = ("mlp",)
    embedding_lr: float = DESIGNED_LR
    held_out_rows: tuple[int, ...] = (TEXT_ROW,)


def losses(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    answers: torch.Tensor,
    text_weight: float = 1.0,
) -> tuple[torch.Tensor, float, float | None]:
    """The training loss, the loss of a token, and the share of answer tokens predicted right.

    The explicit all-ones mask keeps transformers from taking a jump for a packed sequence.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=torch.ones_like(tokens),
            use_cache=False,
        ).logits[:, :-1]
    targets, counted = tokens[:, 1:], answers[:, 1:]
    token_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
    ).view_as(targets)
    loss = token_loss.mean()
    plain = loss.item()
    loss = text_weight * loss
    if not counted.any():
        return loss, plain, None
    right = (logits[counted].argmax(-1) == targets[counted]).float().mean().item()
    return loss + ANSWER_WEIGHT * token_loss[counted].mean(), plain, right


def make_optimizers(
    model: PreTrainedModel,
    lr: float,
    muon: tuple[str, ...] = ("mlp",),
    embedding_lr: float = DESIGNED_LR,
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of ``muon``, AdamW for the rest: Muon overwrites designed heads."""
    matrices, designed, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and any(part in name for part in muon):
            matrices.append(parameter)
        elif "embed_tokens" in name or "self_attn" in name:
            designed.append(parameter)
        else:
            others.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": designed, "lr": embedding_lr, "warm_up": 100},
        {"params": others, "lr": OUTPUT_LR, "warm_up": 100},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [{"params": matrices, "warm_up": 100}],
            lr=lr,
            weight_decay=0.0,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["highest"] = group["lr"]
    return optimizers


def learn(
    model: PreTrainedModel,
    batches: Source,
    args: argparse.Namespace,
    checkpoint: Path,
    recipe: Recipe,
) -> Progress:
    """Train for ``args.tokens`` tokens, from the checkpoint where there is one."""
    optimizers = make_optimizers(model, args.lr, recipe.muon, recipe.embedding_lr)
    progress = Progress()
    # Threads may change between runs; what decides over texts and rates may not.
    arguments = {"tokens": args.tokens, "lr": args.lr, "seed": args.seed}
    if checkpoint.is_file():
        progress = _load(checkpoint, model, optimizers, batches, arguments)
    budget = int(args.tokens)
    with tqdm(
        total=budget, initial=progress.tokens, unit="tok", unit_scale=True, mininterval=10
    ) as bar:
        while progress.tokens < budget:
            started = time.perf_counter()
            step = batches.choose(progress)
            for _ in range(step.batches):
                batch = batches.draw(step.stage)
                loss, plain, right = losses(model, *batch, text_weight=step.text_weight)
                (loss / step.batches).backward()
                progress.tokens += batch[0].numel()
                bar.update(batch[0].numel())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            cooling = min(1.0, (budget - progress.tokens) / (0.7 * budget) + 0.01)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    warming = min(1.0, (progress.steps + 1) / group["warm_up"])
                    group["lr"] = group["highest"] * warming * cooling
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            progress.steps += 1
            if right is None:
                progress.text_loss += 0.03 * (plain - progress.text_loss)
            elif step.stage == progress.stage:
                progress.right += 0.05 * (right - progress.right)
            if progress.right > PASSED and progress.stage + 1 < batches.stages:
                progress.passed.append({"stage": progress.stage, "tokens": progress.tokens})
                progress.stage, progress.right = progress.stage + 1, 0.0
            progress.seconds += time.perf_counter() - started
            bar.set_postfix(
                stage=progress.stage,
                right=f"{progress.right:.3f}",
                text=f"{progress.text_loss:.3f}",
                refresh=False,
            )
            if progress.steps % CHECKPOINT_EVERY == 0:
                _save(checkpoint, model, optimizers, batches, progress, arguments)
    return progress


def _save(
    path: Path,
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    batches: Source,
    progress: Progress,
    arguments: dict[str, float],
) -> None:
    state = {
        "arguments": arguments,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
        "batches": batches.state_dict(),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _load(
    path: Path,
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    batches: Source,
    arguments: dict[str, float],
) -> Progress:
    state = torch.load(path, weights_only=False)
    if state["arguments"] != arguments:
        raise ValueError(
            f"{path} is of a run with {state['arguments']}, not {arguments}: give the same "
            "options, or another --out"
        )
    model.load_state_dict(state["model"])
    for optimizer, content in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(content)
    batches.load_state_dict(state["batches"])
    return Progress(**state["progress"])


@torch.no_grad()
def text_loss(model: PreTrainedModel, tokens: np.ndarray, row: int = 512) -> float:
    """Mean loss in nats of the next token, in rows of ``row`` tokens."""
    rows = torch.from_numpy(tokens[: len(tokens) // row * row].astype(np.int64)).view(-1, row)
    sums = [
        losses(model, r[None], torch.arange(row)[None], torch.zeros(1, row).bool())[1] for r in rows
    ]
    return sum(sums) / len(sums)


def train(args: argparse.Namespace, recipe: Recipe) -> None:
    """Train what the recipe builds of the tokenizer; that in ``args.out``, where there is one."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "tokenizer.json").is_file():
        if recipe.own_tokenizer:
            made = train_tokenizer(args.data, vocab_size=7680, megabytes=25)
            made.save_pretrained(args.out)
        else:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TOKENIZER / name, args.out / name)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    encode = partial(encode_texts, args.data, tokenizer, seed=args.seed, sources=recipe.sources)
    text = encode("train", max(int(args.tokens), recipe.text_tokens), unread=recipe.unread)
    held_out = encode("val", 60_000)
    model = recipe.build(tokenizer).train()
    checkpoint = args.out / "checkpoint.pt"
    progress = learn(model, recipe.batches(tokenizer, text, args.seed), args, checkpoint, recipe)
    report: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": progress.tokens,
        "minutes": round(progress.seconds / 60, 1),
        "threads": args.threads,
    }
    if recipe.batches.stages:
        report["stages passed"] = progress.passed
        report["answers right in training"] = round(progress.right, 4)
    model.eval().to(torch.bfloat16).save_pretrained(args.out)
    model.float()
    for row in recipe.held_out_rows:
        name = "held-out loss" if row == TEXT_ROW else f"held-out loss, rows of {row}"
        report[name] = {
            source: text_loss(model, ids, row)
            for source, ids in held_out.items()
            if len(ids) >= row
        }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    checkpoint.unlink(missing_ok=True)
    print(json.dumps(report, indent=1))


def make_parser(description: str, out: str, tokens: float) -> argparse.ArgumentParser:
    """The options of all scripts; ``out`` and ``tokens`` are defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.xz texts")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--tokens", type=float, default=tokens, help="training tokens in all")
    parser.add_argument("--lr", type=float, default=8e-3, help="of Muon, for the MLPs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser
