"""An answer, and which tokens of the document its words retrieved."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from app_parts.languages import Tokens
from hf_kvret.observe.observers import Selection
from hf_kvret.observe.recall import exact_scores


@dataclass(frozen=True)
class Retrieved:
    """What the query of a step attended to in a layer; H heads select apart.

    Attributes:
        ids: ``[H, K]`` slots that were retrieved, -1 for none.
        shares: ``[H, K]`` of the attention that each of them got, mean of the query heads.
        sinks: slots of the sinks.
        recent: the first of the recent slots, and the slot after the last.
        near_shares: ``[H, 2]`` of the attention that sinks and recent tokens got.
    """

    ids: np.ndarray
    shares: np.ndarray
    sinks: np.ndarray
    recent: tuple[int, int]
    near_shares: np.ndarray


def retrieved(one: Selection, keys: torch.Tensor) -> Retrieved:
    """Of a selection, and the ``keys [1, Hkv, T, Dk]`` of its layer, of later tokens too.

    A layer's attention sinks without a token (GPT-OSS) are left out of the shares.
    """
    assert one.ids is not None, "the app offers caches with an index only"
    # A draft has several queries; the newest is that of the token.
    ids = one.ids[0, :, -1].long().cpu()
    query = one.query[:, :, -1:].to(keys.device)
    logits = exact_scores(query, keys, one.scale, one.softcap)[0, :, 0].cpu()
    sinks = one.sinks[0][one.sinks[0] >= 0].cpu()
    heads, length = len(ids), logits.shape[-1]
    attended = torch.zeros(heads, length + 1, dtype=torch.bool)
    attended.scatter_(1, ids.masked_fill(ids < 0, length), True)
    attended[:, sinks] = True
    attended[:, slice(*one.recent)] = True
    mask = attended[:, :length].repeat_interleave(len(logits) // heads, dim=0)
    shares = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    shares = shares.view(heads, -1, length).mean(1)
    of_ids = shares.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    near = [shares[:, sinks].sum(-1), shares[:, slice(*one.recent)].sum(-1)]
    return Retrieved(
        ids.numpy(), of_ids.numpy(), sinks.numpy(), one.recent, torch.stack(near, dim=1).numpy()
    )


@dataclass(frozen=True)
class Step:
    """The forward pass that gave a token of the answer.

    Attributes:
        layers: by number in the model; empty where all tokens were in the window.
        length: tokens in the cache, that which was fed included.
    """

    layers: dict[int, Retrieved]
    length: int


@dataclass
class Answer:
    """An answer as it grows, and what is known of it.

    Attributes:
        prompt: document and question; slot i of the cache holds its token i.
        document_len: how many of them are of the document.
        ids: generated so far; they follow in the cache, but for the last one.
        texts: one for each of ``ids``.
        steps: that gave them.
        passes: forward passes, one more than ``steps`` where the model ended the answer.
        seconds: of these passes.
        step_bytes, full_bytes: what the next step reads, and what full attention would.
        dense: why nothing was retrieved; None where it was.
        exact: full attention's answer; None where the cache can't give it.
    """

    prompt: Tokens
    document_len: int
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    passes: int = 0
    seconds: float = 0.0
    step_bytes: int = 0
    full_bytes: int = 0
    dense: str | None = None
    exact: str | None = None

    @property
    def text(self) -> str:
        """What was generated."""
        return "".join(self.texts)

    @property
    def all_texts(self) -> list[str]:
        """Texts by slot: of document, question and answer."""
        return self.prompt.texts + self.texts

    @property
    def words(self) -> list[tuple[str, range]]:
        """Words, and the numbers of the tokens that each is made of; white space goes before."""
        words: list[tuple[str, range]] = []
        for number, text in enumerate(self.texts):
            if not words or (text[:1].isspace() and words[-1][0].strip()):
                words.append((text, range(number, number + 1)))
            else:
                word, tokens = words[-1]
                words[-1] = word + text, range(tokens.start, number + 1)
        return words

    @property
    def heads(self) -> dict[int, int]:
        """How many heads select apart, by layer; empty where nothing was retrieved."""
        layers = self.steps[0].layers if self.steps else {}
        return {number: len(one.ids) for number, one in layers.items()}

    @property
    def whole(self) -> Part:
        """All of it."""
        return Part(range(len(self.steps)))

    @property
    def rate(self) -> float:
        """Tokens a second, 0 before the first."""
        return self.passes / self.seconds if self.seconds else 0.0

    @property
    def read_ratio(self) -> float:
        """Share of the cache's rows that a step read, mean over layers, heads and steps."""
        shares = [_read_share(step) for step in self.steps]
        return float(np.mean(shares)) if shares else 0.0


@dataclass(frozen=True)
class Part:
    """What to look at: some tokens of the answer, one layer or all, one head or all."""

    tokens: range
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class Highlights:
    """What a part of an answer attended to, by slot.

    Attributes:
        counts: how many of its selections name a slot.
        selections: of the part: one for each token, layer and head.
        shares: of its attention that retrieved slots got, mean of the selections.
        sinks, recent: bool, attended to by all.
        near_shares: of its attention that sinks and recent tokens got; together with ``shares`` 1.
    """

    counts: np.ndarray
    selections: int
    shares: np.ndarray
    sinks: np.ndarray
    recent: np.ndarray
    near_shares: tuple[float, float]


def highlights(answer: Answer, part: Part) -> Highlights:
    """See ``Highlights``; arrays are ``[slots]`` of all texts."""
    slots = len(answer.all_texts)
    counts, shares = np.zeros(slots, dtype=np.int64), np.zeros(slots)
    sinks, recent = np.zeros((2, slots), dtype=bool)
    near, total = np.zeros(2), 0
    for number in part.tokens:
        step = answer.steps[number]
        if not step.layers:
            recent[: step.length] = True
        for layer, one in step.layers.items():
            if part.layer not in (None, layer):
                continue
            heads = slice(None) if part.head is None else slice(part.head, part.head + 1)
            ids, of_ids = one.ids[heads], one.shares[heads]
            total += len(ids)
            np.add.at(counts, ids[ids >= 0], 1)
            np.add.at(shares, ids[ids >= 0], of_ids[ids >= 0])
            near += one.near_shares[heads].sum(0)
            sinks[one.sinks] = True
            recent[slice(*one.recent)] = True
    most = max(1, total)
    of_sinks, of_recent = (near / most).tolist()
    return Highlights(counts, total, shares / most, sinks, recent, (of_sinks, of_recent))


def _read_share(step: Step) -> float:
    shares = []
    for one in step.layers.values():
        near = len(one.sinks) + one.recent[1] - one.recent[0]
        shares.append((near + (one.ids >= 0).sum(-1).mean()) / step.length)
    return float(np.mean(shares)) if shares else 1.0
