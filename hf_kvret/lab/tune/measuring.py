"""Windows of a text, and variants on one: agreement, KL, bytes and time beside full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from hf_kvret.lab.calibrate.sources import needle_documents
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.evaluate.reader import Reader, divergence
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.tune.selection import FULL
from hf_kvret.lab.tune.variants import Variant


def cut_windows(
    ids: torch.Tensor, context: int, new: int, count: int, *, bos: int | None, seed: int
) -> list[torch.Tensor]:
    """``count`` windows ``[context + new]`` int64; no two share one of their last ``new`` tokens.

    Each is drawn from its own span of the text. Their order is random, so that the first ones are
    not those of the beginning. Contexts of a short text overlap.

    Args:
        ids: ``[n]`` int64 of the text, without BOS.
        context: tokens of a context, with BOS.
        new: tokens that follow it.
        bos: put in front of every window; None for none.
        seed: of starts and order.

    Raises:
        ValueError: fewer than ``context + count * new`` tokens.
    """
    front = torch.tensor([] if bos is None else [bos], dtype=ids.dtype)
    size = context + new - len(front)
    # A span ends with the last start whose new tokens are not those of the next span.
    span = (len(ids) - size + new) / count
    if span < new:
        raise ValueError(
            f"--text has {len(ids):,} tokens, fewer than the {context:,} of --context and the "
            f"{count * new:,} of --tokens: give a longer text, a shorter context or fewer tokens"
        )
    rng = np.random.default_rng(seed)
    starts = [int(span * number + rng.random() * (span - new)) for number in range(count)]
    return [torch.cat([front, ids[start : start + size]]) for start in rng.permutation(starts)]


def needle_windows(context: int, new: int, count: int, seed: int) -> list[torch.Tensor]:
    """``count`` documents ``[context + new]`` int64 of the bundled model's language.

    They end with questions and answers.

    Raises:
        ValueError: documents too short for a needle.
    """
    size = context + new
    return list(needle_documents(count * size, size, seed))


@dataclass(frozen=True, eq=False)
class _Reference:
    """Full attention on a window: its logits ``[n, vocab]`` fp32 on the CPU, and its row."""

    window: int
    logits: torch.Tensor
    row: Row


class Walker:
    """Takes variants through windows of a text, one token a step.

    One filled cache, and the logits of full attention on one window, are kept for the next variant.

    Args:
        subject: the model.
        windows: ``[context + new]`` int64 each.
        new: tokens of a window that are fed one a step, behind its context; what each of them
            foretells is compared.
    """

    def __init__(self, subject: Subject, windows: Sequence[torch.Tensor], new: int) -> None:
        self._model, self._windows, self._new = subject.model, windows, new
        self._reference: _Reference | None = None
        self._filled: tuple[str, int, Reader] | None = None

    def full(self, window: int) -> Row:
        """The row of full attention, which agrees with itself."""
        return self._full(window).row

    def row(self, variant: Variant, window: int) -> Row:
        """The row of a variant on one window.

        ``tokens`` foretold; ``equal``, how many of them are full attention's first choice too;
        ``kl``, the sum over tokens of KL(full || variant) in nats; ``step_bytes``,
        ``device_bytes``, ``host_bytes`` and ``full_bytes`` as in ``Usage``,
        after the last step; ``ms``, the median step.
        """
        reference = self._full(window).logits
        reader = self._base(variant, window).fork(**variant.changes)
        return self._walk(reader, window, reference)[0]

    def _full(self, window: int) -> _Reference:
        if self._reference is None or self._reference.window != window:
            # The memory of the last window is freed first.
            self._reference = self._filled = None
            row, logits = self._walk(self._fill(choose_cache(FULL), window), window)
            self._reference = _Reference(window, logits, row)
        return self._reference

    def _base(self, variant: Variant, window: int) -> Reader:
        name = variant.base.name
        if self._filled is None or self._filled[:2] != (name, window):
            # The memory of the last one is freed first.
            self._filled = None
            self._filled = (name, window, self._fill(variant.base, window))
        return self._filled[2]

    def _fill(self, choice: CacheChoice, window: int) -> Reader:
        """A reader of the window's context."""
        tokens = self._windows[window]
        reader = Reader(self._model, choice, len(tokens))
        reader.prefill(tokens[: -self._new])
        reader.need_logits()
        return reader

    def _walk(
        self, reader: Reader, window: int, reference: torch.Tensor | None = None
    ) -> tuple[Row, torch.Tensor]:
        """The row, and the logits ``[n, vocab]``, which are their own reference without another."""
        logits, times = [], []
        tokens = self._windows[window][-self._new :]
        for token in tqdm(tokens.split(1), leave=False, desc=reader.choice.name, mininterval=1):
            before = reader.seconds
            logits.append(reader.feed(token).float().cpu())
            times.append(1e3 * (reader.seconds - before))
        own = torch.cat(logits)
        reference = own if reference is None else reference
        kl, usage = divergence(reference, own), reader.usage()
        sizes = ("step_bytes", "device_bytes", "host_bytes", "full_bytes")
        row = {
            "tokens": len(own),
            "equal": int((own.argmax(-1) == reference.argmax(-1)).sum()),
            "kl": float(kl.sum()),
            **{name: getattr(usage, name) for name in sizes},
            "ms": median(times),
        }
        return row, own
