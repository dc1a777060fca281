"""Train the reference model: a small Llama of real text that can also find needles in it.

    python examples/train_reference_model.py --data DIR --out reference-llama

``DIR`` holds English text as ``*.jsonl.xz`` (see ``reference_data.py``). A byte-level BPE tokenizer
of 7,680 tokens is made from it, then the model trains on needle documents alone until it copies,
and on plain text with a third of needle documents from there. About half of all tokens stand in
needle documents, which are mostly plain text themselves. The loop and its checkpoints are those of
``training_loop.py``.

As in ``train_needle_model.py``, recall forms quickly because the start is near it
(``reference_start.py``), and reaches further than the rows because positions jump.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from reference_data import NeedleRows
from reference_start import build_model
from train_needle_model import MAX_POSITION, jumping_positions
from training_loop import TEXT_ROW, Progress, Recipe, Step, make_parser, train
from transformers import PreTrainedTokenizerFast

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


def _stack(rows: list[tuple[np.ndarray, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))


def main() -> None:
    options = make_parser(__doc__.splitlines()[0], "reference-llama", 7.5e6)
    train(options.parse_args(), Recipe(build_model, Batches, own_tokenizer=True))


if __name__ == "__main__":
    main()
