"""Train the books model: a small Qwen3 that has read novels only, from a random start.

    python examples/train_books_model.py --data DIR --out reference-books

It is the reference model's opposite where studies of attention need one: no head is designed, there
are no needle documents, positions don't jump, and rows grow to 4,096 tokens. So its attention is
what plain training gives. The loop (``training_loop.py``), its checkpoints and the
tokenizer are the reference model's; its novels are of the same sources, but no piece of them is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from training_loop import Progress, Recipe, Step, make_parser, train
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SOURCES = {"novels100": 0.5, "eltec_eng": 0.5}
LONGEST = 4096
# (tokens read when the stage begins, rows of a batch, their length).
STAGES = ((0, 4, 512), (1_050_000, 1, 2048), (1_300_000, 1, LONGEST))
# All matrices of the layers start random: Muon overwrites nothing.
MUON = ("mlp", "self_attn")


def build_books_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 5.6 million parameters with 4 query heads for each of 2 KV heads."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        # It learns from LONGEST tokens at most; longer windows run.
        max_position_embeddings=4 * LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


class Books:
    """Draws every piece of ``LONGEST`` tokens once, in random order, in rows that grow."""

    stages = 0

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: dict[str, np.ndarray], seed: int
    ) -> None:
        tokens = np.concatenate(list(text.values()))
        chunks = len(tokens) // LONGEST
        if not chunks:
            raise ValueError(f"the text has {len(tokens)} tokens: {LONGEST} are needed at least")
        shuffled = tokens[: chunks * LONGEST].reshape(chunks, LONGEST)
        shuffled = shuffled[np.random.default_rng(seed).permutation(chunks)]
        self.text, self.next = torch.from_numpy(shuffled.astype(np.int64)).flatten(), 0

    def choose(self, progress: Progress) -> Step:
        return Step(stage=None, batches=1)

    def draw(self, stage: int | None) -> tuple[torch.Tensor, ...]:
        """``[rows, length]`` tokens, positions and a mask without answers."""
        start = self.next % len(self.text)
        # A stage begins with a piece, so that no row has parts of two.
        done = self.next // LONGEST * LONGEST
        _, rows, length = [stage for stage in STAGES if stage[0] <= done][-1]
        self.next += rows * length
        tokens = self.text[start : start + rows * length].view(rows, length)
        positions = torch.arange(length).expand_as(tokens)
        return tokens, positions, torch.zeros_like(tokens, dtype=torch.bool)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def main() -> None:
    options = make_parser(__doc__.splitlines()[0], "reference-books", 1.9e6)
    # Embeddings and attention start random: they have further to go.
    options.set_defaults(lr=2e-2)
    recipe = Recipe(
        build_books_model,
        Books,
        sources=SOURCES,
        unread=True,
        text_tokens=2_800_000,
        muon=MUON,
        embedding_lr=4e-3,
        held_out_rows=(512, LONGEST),
    )
    train(options.parse_args(), recipe)


if __name__ == "__main__":
    main()
