"""Which long rows ParisKV's codes find, by how they are rotated and by the number of tiers.

Rows of multi-head latent attention have two parts, a latent and a rotated key, whose scores differ
in scale. Some are drawn at random, with the rotated key's scores 0.1, 1 and 10 times as large as
the latent's; others are those of a tiny random model. For every query alone, recall of its exact
top-100 among the candidates of stage 1, and among the 100 best estimates of stage 2.

    python examples/studies/paris_rows.py --page docs/results/paris_rows.md
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

import hf_kvret
from hf_kvret.evaluation.recording import read_layers
from hf_kvret.evaluation.tables import markdown_table
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.testing.latent_models import LONG_LATENT_MODEL
from hf_kvret.testing.models import MAX_POSITION
from hf_kvret_kernels import paris
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.paris.codes import rotation_stride

WANTED = 100
BETA, RHO = 0.10, 0.20
SIX = ParisConfig().tiers_for(1)
THREE = ParisConfig().tiers_for(43)
_ROTATIONS = ("padded", "blocks", "mixed blocks")
_QUERIES = 8
_HEADS = 4
_NOPE_DIM = 128
_HIDDEN = 256
_TOPICS = 48


@dataclass(frozen=True)
class Rows:
    """Keys ``[n, D]`` and queries ``[q, D]`` of one latent head.

    Attributes:
        name: what they are.
        dims: numbers of the latent and of the rotated key.
    """

    name: str
    dims: tuple[int, int]
    keys: torch.Tensor
    queries: torch.Tensor


def drawn_rows(dims: tuple[int, int], tokens: int, ratio: float, seed: int) -> Rows:
    """Rows as multi-head latent attention makes them of hidden states with topics.

    Args:
        ratio: deviation of the rotated keys' scores over that of the latents' scores.
    """
    rank, rope = dims
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def states(count: int) -> torch.Tensor:
        which = torch.randint(0, _TOPICS, (count,), generator=generator)
        return topics[which] + 0.7 * draw(count, _HIDDEN) * spectrum

    def latents(hidden: torch.Tensor) -> torch.Tensor:
        """Normalized, with a learned scale."""
        down = hidden @ to_latent
        return down * down.square().mean(-1, keepdim=True).rsqrt() * gains

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated by positions: ``x [n, rope]``."""
        angles = positions.unsqueeze(-1) * 10_000.0 ** (-torch.arange(0, rope, 2) / rope)
        even, odd = x[:, 0::2], x[:, 1::2]
        pair = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(pair, dim=-1).flatten(-2)

    spectrum = (torch.arange(_HIDDEN) + 1.0) ** -0.5
    topics = draw(_TOPICS, _HIDDEN) * spectrum
    to_latent, gains = draw(_HIDDEN, rank) / _HIDDEN**0.5, (0.4 * draw(rank)).exp()
    to_rope = draw(_HIDDEN, rope) / _HIDDEN**0.5
    context, asking = states(tokens), states(_QUERIES)
    latent = latents(context)
    rotated = turned(context @ to_rope, torch.arange(tokens))
    latent_parts, rope_parts = [], []
    for _ in range(_HEADS):
        # A head looks for what its own projection of the asking token's latent is like.
        up = draw(_NOPE_DIM, rank) / rank**0.5
        head = asking @ draw(_HIDDEN, _NOPE_DIM) / _HIDDEN**0.5 + latents(asking) @ up.T
        latent_parts.append(head @ up)
        own = asking @ (to_rope + 0.5 * draw(_HIDDEN, rope) / _HIDDEN**0.5)
        rope_parts.append(turned(own, torch.full((_QUERIES,), tokens)))
    query, rope_query = torch.cat(latent_parts), torch.cat(rope_parts)
    scale = (ratio * (query @ latent.T).std() / (rope_query @ rotated.T).std()).sqrt()
    return Rows(
        f"drawn, rope scores x {ratio:g}",
        dims,
        torch.cat([latent, scale * rotated], dim=-1),
        torch.cat([query, scale * rope_query], dim=-1),
    )


def model_rows(tokens: int) -> list[Rows]:
    """Rows of the upper layer of a tiny random model, and its heads' last absorbed queries."""
    config = LONG_LATENT_MODEL.config()
    # Latents of the lowest layer depend on the token alone.
    config.num_hidden_layers = 2
    model = replace(LONG_LATENT_MODEL, config=lambda: config).build()
    hf_kvret.attach(model)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(
        3, config.vocab_size, (min(tokens, MAX_POSITION - 1),), generator=generator
    )
    layer = read_layers(model, text)[-1]
    queries = layer.queries[:, -_QUERIES:].flatten(0, 1)
    dims = config.kv_lora_rank, config.qk_rope_head_dim
    return [Rows("tiny random model", dims, layer.keys[0], queries)]


def rotated_length(dim: int, rotation: str) -> int:
    """P of rows of ``dim`` numbers."""
    return 1 << (dim - 1).bit_length() if rotation == "padded" else -(-dim // 8) * 8


def recalls(
    rows: Rows, rotation: str, tiers: Sequence[float], beta: float = BETA
) -> tuple[float, float]:
    """Recall of the exact top 100 of each query: among the candidates, and after the rerank."""
    keys, queries = rows.keys - rows.keys.mean(0), rows.queries
    exact = (queries @ keys.T).topk(WANTED).indices
    length = rotated_length(keys.shape[1], rotation)
    signs, levels = paris.random_signs(length, 0), paris.magnitude_levels(8)
    keys, queries = (torch.nn.functional.pad(x, (0, length - x.shape[1])) for x in (keys, queries))
    if rotation == "blocks":
        # The shuffle takes these places back.
        order = torch.arange(length) * rotation_stride(length) % length
        keys, queries = (torch.zeros_like(x).index_copy(1, order, x) for x in (keys, queries))
    codes = paris.encode(keys[None, None], signs, levels, backend="naive")
    q_rot = paris.rotate(queries, signs, backend="naive")[None, None, :, None]
    counts = paris.count_centroids(codes.sign, backend="naive")
    shares = tuple(paris.tier_shares(RHO, tuple(tiers)).tolist())
    bonus = naive.bonus_table(q_rot, counts, shares, 8)
    scores = naive.collide(codes.sign, bonus, 8, None, torch.int16)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    ids = order[..., : max(WANTED, math.ceil(beta * len(keys)))].int()
    estimates = paris.rerank(q_rot, codes, ids, levels, backend="naive")[:, :, :, 0]
    best = ids.gather(-1, estimates.topk(WANTED).indices)
    return _overlap(ids[0, 0], exact), _overlap(best[0, 0], exact)


def equal_reading(dim: int) -> float:
    """Share of candidates at which codes in blocks are read as much as padded ones at ``BETA``.

    Stage 1 reads the signs of all tokens, P / 8 bytes, stage 2 whole codes, 3 P / 4 bytes.
    """
    padded, blocks = (rotated_length(dim, rotation) for rotation in ("padded", "mixed blocks"))
    return (padded * (1 / 8 + 3 / 4 * BETA) / blocks - 1 / 8) * 4 / 3


def table(tokens: int, seeds: int) -> Iterator[list[str]]:
    """Rows of the page's table."""
    for dims in ((512, 64), (256, 64), (256, 32), (128, 32)):
        ways = [
            [drawn_rows(dims, tokens, ratio, seed) for seed in range(seeds)]
            for ratio in (0.1, 1.0, 10.0)
        ]
        if dims == (512, 64):
            ways.append(model_rows(tokens))
        whole = sum(dims)
        variants = [(rotation, tiers, BETA) for rotation in _ROTATIONS for tiers in (SIX, THREE)]
        variants.append((_ROTATIONS[-1], THREE, equal_reading(whole)))
        for way in ways:
            for rotation, tiers, beta in variants:
                shares = [recalls(rows, rotation, tiers, beta) for rows in way]
                first, second = (fmean(one[i] for one in shares) for i in range(2))
                length = rotated_length(whole, rotation)
                row = [f"{dims[0]} + {dims[1]}", way[0].name, rotation, str(len(tiers))]
                row += ["16 bits" if len(tiers) * length // 8 > 254 else "byte", f"{beta:.1%}"]
                yield [*row, f"{3 * length // 4}", f"{first:.3f}", f"{second:.3f}"]


def page(tokens: int, seeds: int, command: str) -> str:
    """The whole page, as Markdown."""
    head = ("row", "rows", "rotation", "tiers", "points in", "candidates", "bytes a code")
    tables = markdown_table((*head, "stage 1", "both stages"), list(table(tokens, seeds)))
    return f"# Rotation and tiers of long rows\n\n{tables}\n\n{_NOTES}\nMade by `{command}`.\n"


def _overlap(ids: torch.Tensor, exact: torch.Tensor) -> float:
    return (exact.unsqueeze(-1) == ids.unsqueeze(-2)).any(-1).float().mean().item()


_NOTES = """\
Recall of the exact top 100 of single queries, means of all queries and draws. *padded*: zeros
up to a power of two, one transform. *blocks*: a transform for each of the powers of two that add
up to the row, each of neighbouring numbers. *mixed blocks*, which ParisKV takes above 128 numbers:
numbers change places first, so that each block has its share of latent and rotated key. The last
line of each kind has as many candidates as can be read in the bytes that padded codes take at 10%.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of a context (default: 8192)")
    parser.add_argument("--seeds", type=int, default=2, help="draws of each kind (default: 2)")
    parser.add_argument("--page", type=Path, help="write the page there instead of printing it")
    options = parser.parse_args(arguments)
    command = "python examples/studies/paris_rows.py --page docs/results/paris_rows.md"
    text = page(options.tokens, options.seeds, command)
    if options.page is None:
        print(text)
    else:
        options.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
