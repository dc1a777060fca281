"""Train the reference model: a small Llama of real text that can also find needles in it.

    python examples/train_reference_model.py --data DIR --out reference-llama

``DIR`` holds English text as ``*.jsonl.xz`` (see ``reference_data.py``). A byte-level BPE tokenizer
of 7,680 tokens is made from it, then the model trains on needle documents alone until it copies,
and on plain text with a third of needle documents from there. About half of all tokens stand in
needle documents, which are mostly plain text themselves. What is learnt is repeatable: one seed,
and every decision is made from counts, never from the clock. A run that is interrupted goes on from
its last checkpoint when the same command is given again.

As in ``train_needle_model.py``, recall forms quickly because the start is near it
(``reference_start.py``), and reaches further than the rows because positions jump.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from reference_data import SOURCES, NeedleRows, encode_texts, train_tokenizer
from reference_start import build_model
from torch import nn
from tqdm import tqdm
from train_needle_model import MAX_POSITION, jumping_positions
from transformers import PreTrainedModel, PreTrainedTokenizerFast

TEXT_ROW, TEXT_ROWS = 512, 4
# Share of the batches that are needle documents. Facts, questions and answers are about half of a
# document, the rest of it is plain text too.
NEEDLE_SHARE = 0.35
# (row length, needles, rows of a batch, largest sum of position jumps). The next stage begins when
# the share PASSED of the answer tokens is right.
STAGES = (
    (256, 3, 8, 0),
    (512, 6, 4, 2_048),
    (1024, 8, 2, 16_384),
    (2048, 12, 1, MAX_POSITION),
    (4096, 16, 1, MAX_POSITION),
)
ANSWER_WEIGHT = 2.0
# In the first stage there are needle documents only, and all but answers weighs this little:
# copying comes first, or the noise of learning to write would wash its beginnings away.
FIRST_WEIGHT = 0.05
# Steps of one batch for the first tokens, of two afterwards.
SMALL_BATCHES = 1_500_000
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
    """What a step learns from: ``pieces`` batches of needle documents of ``stage``, or of plain
    text where that is None; all but answers weighs ``text_weight``."""

    stage: int | None
    pieces: int
    text_weight: float = 1.0


class Source(Protocol):
    """Where ``learn`` takes batches from. A checkpoint holds its ``state_dict``."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: dict[str, np.ndarray], seed: int
    ) -> None: ...

    def choose(self, progress: Progress) -> Step: ...

    def draw(self, stage: int | None) -> tuple[torch.Tensor, ...]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Batches:
    """Draws batches of plain text and of needle documents."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: dict[str, np.ndarray], seed: int
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.needles = NeedleRows(tokenizer, text, seed)
        self.text = np.concatenate(list(text.values()))
        rows = len(self.text) // TEXT_ROW
        self.order, self.next = self.rng.permutation(rows), 0
        self.newline = tokenizer("\n\n", add_special_tokens=False)["input_ids"][0]

    def choose(self, progress: Progress) -> Step:
        """Needle documents at first, then a share; older stages come back, so that none is lost."""
        stage = progress.stage
        pieces = 1 if progress.tokens < SMALL_BATCHES else 2
        if stage == 0:
            return Step(stage, pieces, FIRST_WEIGHT)
        if self.rng.random() >= NEEDLE_SHARE:
            return Step(None, pieces)
        if self.rng.random() < 0.25:
            stage = int(self.rng.integers(stage))
        return Step(stage, pieces)

    def draw(self, stage: int | None) -> tuple[torch.Tensor, ...]:
        return self.plain() if stage is None else self.documents(stage)

    def state_dict(self) -> dict[str, Any]:
        return {
            "next": self.next,
            "numpy": self.rng.bit_generator.state,
            "python": self.needles.rng.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
        self.rng.bit_generator.state = state["numpy"]
        self.needles.rng.setstate(state["python"])

    def plain(self) -> tuple[torch.Tensor, ...]:
        """``[TEXT_ROWS, TEXT_ROW]`` tokens, positions and a mask without answers."""
        rows = []
        for _ in range(TEXT_ROWS):
            start = int(self.order[self.next % len(self.order)]) * TEXT_ROW
            self.next += 1
            tokens = self.text[start : start + TEXT_ROW].astype(np.int64)
            boundaries = np.flatnonzero(tokens[:-1] == self.newline) + 1
            positions = jumping_positions(self.rng, TEXT_ROW, boundaries, MAX_POSITION)
            rows.append((tokens, positions, np.zeros(TEXT_ROW, dtype=bool)))
        return _stack(rows)

    def documents(self, stage: int) -> tuple[torch.Tensor, ...]:
        """Needle documents of a stage: tokens, positions and the answers' mask."""
        length, needles, batch, jump = STAGES[stage]
        rows = []
        for _ in range(batch):
            row = self.needles.row(length, int(self.rng.integers(1, needles + 1)))
            positions = jumping_positions(self.rng, length, row.boundaries, jump)
            rows.append((row.tokens, positions, row.is_answer))
        return _stack(rows)


@dataclass(frozen=True)
class Recipe:
    """What differs between the models that learn here.

    Attributes:
        build: makes the model that starts, of the tokenizer.
        batches: where batches come from.
        sources: shares of the training tokens.
        unread: whether to take text that the other models have not read, see ``encode_texts``.
        muon: parts of the names of matrices that Muon trains.
        embedding_lr: learning rate under AdamW of embeddings, and of attention if not under Muon.
        held_out_rows: lengths of rows of held-out text.
    """

    build: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    batches: type[Source] = Batches
    sources: Mapping[str, float] = field(default_factory=lambda: SOURCES)
    unread: bool = False
    muon: tuple[str, ...] = ("mlp",)
    embedding_lr: float = DESIGNED_LR
    held_out_rows: tuple[int, ...] = (TEXT_ROW,)


def _stack(rows: list[tuple[np.ndarray, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))


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
            for _ in range(step.pieces):
                batch = batches.draw(step.stage)
                loss, plain, right = losses(model, *batch, step.text_weight)
                (loss / step.pieces).backward()
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
            if progress.right > PASSED and progress.stage + 1 < len(STAGES):
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
    if (args.out / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    else:
        tokenizer = train_tokenizer(args.data, vocab_size=7680, megabytes=25)
        tokenizer.save_pretrained(args.out)
    encode = partial(encode_texts, args.data, tokenizer, seed=args.seed, sources=recipe.sources)
    text = encode("train", int(args.tokens), unread=recipe.unread)
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
    if recipe.batches is Batches:
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


def parser(description: str, out: str, tokens: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.xz texts")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--tokens", type=float, default=tokens, help="training tokens in all")
    parser.add_argument("--lr", type=float, default=8e-3, help="of Muon, for the MLPs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main() -> None:
    train(
        parser(__doc__.splitlines()[0], "reference-llama", 7.5e6).parse_args(), Recipe(build_model)
    )


if __name__ == "__main__":
    main()
