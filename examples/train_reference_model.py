"""Train the reference model: a small Llama of real text that can also find needles in it.

    python examples/train_reference_model.py --data DIR --out reference-llama

``DIR`` holds English text as ``*.jsonl.xz`` (see ``reference_data.py``). A byte-level BPE tokenizer
of 7,680 tokens is made from it, then the model trains on needle documents alone until it copies,
and on plain text with a third of needle documents from there. About half of all tokens stand in
needle documents, which are mostly plain text themselves. The loop and its checkpoints are those of
``training_loop.py``.

As in ``train_needle_model.py``, recall forms quickly because the start is near it
(``start_near_recall``), and reaches further than the rows because positions jump.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from reference_data import NeedleRows
from torch import nn
from train_needle_model import MAX_POSITION, jumping_positions
from training_loop import TEXT_ROW, Progress, Recipe, Step, make_parser, train
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.06,
    )
    model = LlamaForCausalLM(config)
    start_near_recall(model)
    return model


# The residual stream at the start: embeddings, the token before, the one before that, and a bag of
# the last dozen. The last coordinate is the same for every token; heads without biases need it to
# attend by position.
EMBEDDING, PREVIOUS, SECOND, BAG = slice(0, 112), slice(112, 160), slice(160, 208), slice(208, 255)
CONSTANT = 255


@torch.no_grad()
def start_embeddings(model: PreTrainedModel) -> torch.Tensor:
    """Sets embeddings and output matrix; returns the embeddings ``[vocabulary, width]``."""
    config = model.config
    scale = config.initializer_range
    embedding = 0.3 * scale * torch.randn(config.vocab_size, config.hidden_size)
    embedding[:, EMBEDDING] = scale * torch.randn(config.vocab_size, EMBEDDING.stop)
    embedding[:, CONSTANT] = 0.5 * scale * EMBEDDING.stop**0.5
    model.model.embed_tokens.weight.copy_(embedding)
    # Untied: a tied output would push all embeddings the same way and bury what tells them apart.
    model.lm_head.weight.copy_(embedding)
    model.lm_head.weight[:, EMBEDDING.stop :] = 0.0
    return embedding


@torch.no_grad()
def start_near_recall(model: LlamaForCausalLM) -> None:
    """Weights from which copying forms within minutes; everything is trained from there.

    The first layer copies the tokens one and two back and a blurred bag of the last dozen. In the
    next three layers, one head starts as an induction head: its query reads a token and the one
    before, its keys read the two tokens before theirs, so that it finds what came after the same
    two tokens, and writes that back. Another one attends to places with a similar bag.
    """
    config = model.config
    width, dim = config.hidden_size, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    embedding = start_embeddings(model)
    reads = [torch.linalg.qr(torch.randn(EMBEDDING.stop, dim)).Q.T for _ in range(2)]
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.o_proj.weight.mul_(0.03)
        layer.mlp.down_proj.weight.mul_(0.05)
        if number > 3:
            continue
        for head, read in enumerate(reads):
            rows = slice(head * dim, (head + 1) * dim)
            attention.v_proj.weight[rows] *= 0.1
            attention.v_proj.weight[rows, EMBEDDING] += read
            if number == 0:
                continue
            columns = slice(head * group * dim, (head * group + 1) * dim)
            query, key = torch.zeros(dim, width), torch.zeros(dim, width)
            if head == 0:
                newest, older = (0.14 * torch.randn(dim, 48) for _ in range(2))
                # The first layer copies a vector of about twice the token's own size.
                query[:, EMBEDDING] = 2.0 * newest @ reads[0][:48]
                query[:, PREVIOUS], key[:, PREVIOUS], key[:, SECOND] = older, newest, older
            else:
                query[:, BAG] = 0.08 * torch.randn(dim, BAG.stop - BAG.start)
                key = query.clone()
            for projection in (query, key):
                # The fast coordinates of the rotary embedding tell little at a distance.
                projection.view(2, dim // 2, width)[:, :8] *= 0.3
            attention.k_proj.weight[rows] *= 0.2
            attention.k_proj.weight[rows] += key
            attention.q_proj.weight[columns] *= 0.2
            attention.q_proj.weight[columns] += query
            attention.o_proj.weight[EMBEDDING, columns] += 0.1 * read.T
    first = model.model.layers[0].self_attn
    _attend_by_position(first, embedding)
    for query_head, target in ((0, PREVIOUS), (1, SECOND), (group, BAG)):
        columns = slice(query_head * dim, (query_head + 1) * dim)
        size = target.stop - target.start
        first.o_proj.weight[target] *= 0.1
        first.o_proj.weight[target, columns] += 0.1 * torch.eye(dim)[:size]


def _attend_by_position(attention: nn.Module, embedding: torch.Tensor) -> None:
    """First-layer heads that look 1 and 2 tokens back, and one that looks over the last dozen."""
    config = attention.config
    dim, half = config.head_dim, config.head_dim // 2
    group = config.num_attention_heads // config.num_key_value_heads
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    sharp, broad = torch.zeros(half), torch.zeros(half)
    # Six fast frequencies single out one offset; slower ones fall off over a dozen tokens.
    sharp[:6] = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]) / 12
    broad[3:12] = 1 / 9
    constant = (embedding[:, CONSTANT] / embedding.pow(2).mean(-1).sqrt()).mean()
    for query, offset, shares, logit in (
        (0, 1, sharp, 30.0),
        (1, 2, sharp, 30.0),
        (group, 3, broad, 12.0),
    ):
        key = query // group * dim
        strength = (logit * dim**0.5 * shares).sqrt() / constant
        attention.k_proj.weight[key : key + half, CONSTANT] = strength
        start = query * dim
        attention.q_proj.weight[start : start + dim] *= 0.2
        cosine, sine = torch.cos(offset * angles), torch.sin(offset * angles)
        attention.q_proj.weight[start : start + half, CONSTANT] = strength * cosine
        attention.q_proj.weight[start + half : start + dim, CONSTANT] = -strength * sine


TEXT_ROWS = 4
# Share of the batches that are needle documents. Facts, questions and answers are about half of a
# document, the rest of it is plain text too.
NEEDLE_SHARE = 0.35
# (row length, needles, rows of a batch, largest sum of position jumps).
STAGES = (
    (256, 3, 8, 0),
    (512, 6, 4, 2_048),
    (1024, 8, 2, 16_384),
    (2048, 12, 1, MAX_POSITION),
    (4096, 16, 1, MAX_POSITION),
)
# In the first stage there are needle documents only, and all but answers weighs this little:
# copying comes first, or the noise of learning to write would wash its beginnings away.
FIRST_WEIGHT = 0.05
# Steps of one batch for the first tokens, of two afterwards.
SMALL_BATCHES = 1_500_000


class Batches:
    """Draws batches of plain text and of needle documents."""

    stages = len(STAGES)

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
        batches = 1 if progress.tokens < SMALL_BATCHES else 2
        if stage == 0:
            return Step(stage, batches, FIRST_WEIGHT)
        if self.rng.random() >= NEEDLE_SHARE:
            return Step(None, batches)
        if self.rng.random() < 0.25:
            stage = int(self.rng.integers(stage))
        return Step(stage, batches)

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


def _stack(rows: list[tuple[np.ndarray, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))


def main() -> None:
    options = make_parser(__doc__.splitlines()[0], "reference-llama", 7.5e6)
    train(options.parse_args(), Recipe(build_model, Batches, own_tokenizer=True))


if __name__ == "__main__":
    main()
