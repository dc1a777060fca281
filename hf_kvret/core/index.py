"""The Index contract: which of the cold tokens matter for a query."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.state import State

if TYPE_CHECKING:
    from hf_kvret.core.store import Store


@dataclass(frozen=True, eq=False)
class ColdTokens:
    """The cold tokens of a layer, and how a query is to be compared with them.

    Attributes:
        store: holds them; an index may read keys in it.
        valid: ``[B, n]`` bool; False for padding, holes and sinks: never to be selected.
        scale: factor of the dot products before the softmax.
        softcap: as in ``Index.select``, or None.
        budget: how many of them a query selects now.
    """

    store: Store
    valid: torch.Tensor
    scale: float
    softcap: float | None
    budget: int

    def __len__(self) -> int:
        return self.valid.shape[1]


class Index(State):
    """Finds the few cold tokens that a query attends to. One per retrieval layer.

    Tokens arrive in order and keep their slot number, the number that ``select`` answers with.
    The life of an index: ``observe`` for each block of the prompt, ``build`` once, then ``extend``
    for each block that leaves the window. ``build`` or ``refresh`` comes before each selection, and
    ``learn`` after it. ``watch`` announces every forward pass, from the first on. An index keeps
    its state in preallocated tensors on the device and never synchronizes the host when one
    token is decoded, unless a block left the window just before.

    What it holds it declares, see ``State``: then it is reordered, cropped, forked, saved and
    loaded with the cache.

    Attributes:
        whole: all cold tokens are attended to, always. The layer then reads the store piece by
            piece and never calls ``select``, ``learn`` or ``candidates``.
    """

    whole: ClassVar[bool] = False

    def watch(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """See the tokens of a forward pass before anything else is done with them.

        They are recent from then on and come as a block when they leave the window. A pass that
        starts below the end of the last one follows a crop.

        Args:
            queries: ``[B, Hq, q, Dk]``, post-RoPE; may be kept, must not be changed.
            keys: ``[B, Hkv, q, Dk]``, post-RoPE; the same.
            start: slot of the first of the q tokens.
            valid: ``[B, q]`` bool, False for padding; None when all are valid.
            positions: ``[B, q]`` integers, where the model's RoPE puts the tokens; None where the
                model does not tell.
        """

    def positions(self, start: int, end: int) -> torch.Tensor | None:
        """``[B, end - start]`` integers that ``watch`` was told for these slots.

        None unless the index keeps them, for a store that needs them in its blocks.
        """
        return None

    @abstractmethod
    def observe(self, block: TokenBlock) -> None:
        """Take in a block of the prompt. ``block.start`` is the number of tokens held so far."""

    def build(self, cold: ColdTokens) -> None:
        """Finish what needs the whole prompt. Called once, with at least one token held.

        That is before the first selection, or earlier, when the cache is forked or saved, so that
        no copy has to do it again. ``cold`` holds the same tokens.
        """

    def refresh(self, cold: ColdTokens) -> None:
        """Called instead of ``build`` before each later selection: rare upkeep, if any is due."""

    def extend(self, block: TokenBlock) -> None:
        """Take in a block after ``build``; by default the same as ``observe``."""
        self.observe(block)

    @abstractmethod
    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """The tokens to attend to, for each query.

        Args:
            query: ``[B, Hq, Q, Dk]``, post-RoPE; Q > 1 for drafted tokens.
            budget: how many tokens to select, ``1 <= budget <= n`` with n tokens held.
            valid: ``[B, n]`` bool; False for padding, holes and sinks: never to be selected.
            scale: the factor of the dot products before the softmax.
            softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None. It keeps the order of a head's
                tokens, but not how the heads of a group compare.

        Returns:
            ``[B, Hkv, Q, budget]`` or ``[B, Hq, Q, budget]`` int32 slots, each at most once a
            row, -1 where fewer than ``budget`` tokens are valid, or where an index that prunes
            knows fewer. With ``budget == n`` every valid token is selected: stages that prune
            must let all pass.
        """

    def learn(self) -> None:
        """Called while the selected rows are being read: what a selection leaves to be noted."""

    def uncapturable(self) -> str | None:
        """Why a decode step that selects here can't be replayed from a CUDA graph; None: it can.

        It can where ``watch``, ``refresh``, ``select`` and ``learn``, for one token between two
        flushes, launch the same work on the same memory each time: no host synchronization, no
        number of the host that changes from step to step (``start`` of ``watch`` does), state
        changed in place. They run once, to be captured; ``replayed`` stands for their other runs.
        """
        return f"the index {type(self).__name__} does not say that its steps can be captured"

    def settle(self) -> None:
        """A step is about to be captured: do now what would otherwise come due in one."""

    def broke_off(self) -> None:
        """The capture after ``settle`` failed, and the device did nothing.

        What was noted on the host since then is to be undone.
        """

    def replayed(self) -> None:
        """A captured step was replayed: what its run in Python would have noted on the host."""

    @abstractmethod
    def candidates(self, cold_len: int, budget: int) -> int:
        """How many of ``cold_len`` tokens are scored in full precision or reranked."""

    def set_options(self, options: Any) -> None:
        """Go on with other options, of those that a fork may change.

        Replaces the attribute ``options``, where an index has one.
        """
        if hasattr(self, "options"):
            self.options = options

    def shared_nbytes(self) -> int:
        """Bytes of what all caches of a process share, as calibrated tensors on the device."""
        return 0

    def select_nbytes(self) -> int:
        """Bytes that one ``select`` reads, for reports; all of them unless a method says less."""
        return self.nbytes()

    def keys_read(self, cold_len: int, budget: int) -> int:
        """Keys that one ``select`` reads in the store, for each query and KV head; for reports."""
        return 0

    def stats(self) -> dict[str, Any]:
        """Plain numbers of the method's own, for ``cache.stats()``; may wait for the device."""
        return {}
