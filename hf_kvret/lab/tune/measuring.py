"""What one variant does on one window: agreement, KL, bytes and time beside full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from tqdm import tqdm

from hf_kvret.lab.calibrate.sources import needle_documents
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.tune.selection import FULL
from hf_kvret.lab.tune.variants import Variant


def cut_windows(
    ids: torch.Tensor, context: int, new: int, count: int, *, bos: int | None, seed: int
) -> list[torch.Tensor]:
    """``count`` windows ``[context + new]`` int64, of which no two share a token of their last.

    Each is drawn from its own part of the text, in a random order, so that the first ones are not
    of its beginning. Contexts of a short text overlap.

    Args:
        ids: ``[n]`` int64 of the text, without BOS.
        context: tokens of a context, with BOS.
        new: tokens that follow it.
        bos: put in front of every window; None for none.
        seed: of places and order.

    Raises:
        ValueError: fewer than ``context + count * new`` tokens.
    """
    begun = [] if bos is None else [bos]
    size = context + new - len(begun)
    # A part ends where the last of its windows that leaves the next part's tokens alone begins.
    part = (len(ids) - size + new) / count
    if part < new:
        raise ValueError(
            f"--text has {len(ids):,} tokens, fewer than the {context:,} of --context and the "
            f"{count * new:,} of --tokens: give a longer text, a shorter context or fewer tokens"
        )
    rng = np.random.default_rng(seed)
    starts = [int(part * place + rng.random() * (part - new)) for place in range(count)]
    front = torch.tensor(begun, dtype=ids.dtype)
    return [torch.cat([front, ids[start : start + size]]) for start in rng.permutation(starts)]


def needle_windows(context: int, new: int, count: int, seed: int) -> list[torch.Tensor]:
    """``count`` documents ``[context + new]`` int64 of the bundled model's language.

    They end with questions and answers.

    Raises:
        ValueError: documents too short for a needle.
    """
    size = context + new
    return list(needle_documents(count * size, size, seed))


_PIECE = 16


@dataclass(frozen=True, eq=False)
class _Told:
    """What full attention says on a window: logits ``[n, vocab]`` fp32 on the CPU, and its row."""

    window: int
    logits: torch.Tensor
    row: Row


class Walker:
    """Takes variants through windows of a text, one token a step.

    One filled cache, and what full attention says on one window, are kept for the next variant.

    Args:
        subject: the model.
        windows: ``[context + new]`` int64 each.
        new: tokens of a window that are foretold; the step for the first of them is fed the
            context's last token.
    """

    def __init__(self, subject: Subject, windows: Sequence[torch.Tensor], new: int) -> None:
        self._model, self._windows, self._new = subject.model, windows, new
        self._told: _Told | None = None
        self._filled: tuple[str, int, Reader] | None = None
        self._failed: tuple[str, int] | None = None

    def full(self, window: int) -> Row:
        """As ``row``, of full attention, which agrees with itself."""
        return self._full(window).row

    def row(self, variant: Variant, window: int) -> Row:
        """The numbers of a variant on one window.

        ``tokens`` foretold; ``equal``, how many of them are full attention's first choice too;
        ``kl`` and ``kl_squares``, sums over tokens of KL(full || variant) in nats and of its
        square; ``step_bytes``, ``device_bytes``, ``host_bytes`` and ``full_bytes`` as in ``Usage``,
        after the last step; ``ms``, the median step.

        Raises:
            MemoryError: there was too little for the cache that it is a fork of.
        """
        told = self._full(window)
        reader = self._base(variant, window).fork(**variant.changes)
        return self._walk(reader, window, told.logits)[0]

    def _full(self, window: int) -> _Told:
        if self._told is None or self._told.window != window:
            # Room for the next one.
            self._told = self._filled = None
            row, logits = self._walk(self._fill(choose_cache(FULL), window), window)
            self._told = _Told(window, logits, row)
        return self._told

    def _base(self, variant: Variant, window: int) -> Reader:
        name = variant.base.name
        if self._failed == (name, window):
            raise MemoryError(f"the cache {name} did not fit")
        if self._filled is None or self._filled[:2] != (name, window):
            self._filled, self._failed = None, (name, window)
            reader = self._fill(variant.base, window)
            self._filled, self._failed = (name, window, reader), None
        return self._filled[2]

    def _fill(self, choice: CacheChoice, window: int) -> Reader:
        """A reader of the window's context, but for the last token."""
        tokens = self._windows[window]
        reader = Reader(self._model, choice, len(tokens))
        reader.prefill(tokens[: -self._new - 1])
        return reader

    def _walk(
        self, reader: Reader, window: int, told: torch.Tensor | None = None
    ) -> tuple[Row, torch.Tensor]:
        """The row, and the logits ``[n, vocab]``; ``told`` None for those of full attention."""
        logits, times = [], []
        given = self._windows[window][-self._new - 1 : -1]
        for token in tqdm(given.split(1), leave=False, desc=reader.choice.name, mininterval=1):
            before = reader.seconds
            logits.append(reader.feed(token).float().cpu())
            times.append(1e3 * (reader.seconds - before))
        own = torch.cat(logits)
        told = own if told is None else told
        kl, usage = divergence(told, own), reader.usage()
        sizes = ("step_bytes", "device_bytes", "host_bytes", "full_bytes")
        row = {
            "tokens": len(own),
            "equal": int((own.argmax(-1) == told.argmax(-1)).sum()),
            "kl": float(kl.sum()),
            "kl_squares": float(kl.square().sum()),
            **{name: getattr(usage, name) for name in sizes},
            "ms": median(times),
        }
        return row, own


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``[n]`` fp64 KL(full || other) in nats of logits ``[n, vocab]``, never below 0."""
    # In pieces: fp64 of a large vocabulary takes much room.
    pieces = zip(full.split(_PIECE), other.split(_PIECE), strict=True)
    found = []
    for pair in pieces:
        p, q = (logits.double().log_softmax(-1) for logits in pair)
        found.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
    return torch.cat(found)
