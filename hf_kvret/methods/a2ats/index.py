"""A2ATSIndex: one code a token, scored by looking it up (A2ATS, section 4)."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import ColdTokens, Index, SearchCost
from hf_kvret.core.state import number
from hf_kvret.core.token_buffer import TokenBuffer, passed
from hf_kvret.methods.a2ats.config import A2ATSConfig
from hf_kvret.methods.a2ats.learned import LearnedLayer, learned_layer, load
from hf_kvret_kernels import centroid, codebook
from hf_kvret_kernels.top_k import top_k


class A2ATSIndex(Index):
    """Two bytes a token and KV head: the codeword that is nearest to its key before RoPE.

    A step multiplies the query, rotated to a fixed distance, with the codewords, and looks up the
    score of every token. Codes are made on arrival, so those of recent tokens wait here too.

    Args:
        options: with an artifact.
        layer: number of the layer in the model.
    """

    capture_obstacle = "a2ats encodes each token to a place that the host keeps"

    _codes: TokenBuffer = passed()
    _cold: int = number(0)
    # Of what calibration taught, so that a file is read with the same.
    _fingerprint: int = number(0, key="learned")

    def __init__(self, options: A2ATSConfig, layer: int) -> None:
        self.options, self.layer = options, layer
        self._found: CalibrationArtifact | None = None
        self._learned: LearnedLayer | None = None
        # Positions [B, q] of the newest pass, whose queries are about to select.
        self._positions: torch.Tensor | None = None

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        learned = self._on(keys.device)
        if len(self._codes) < start:
            raise RuntimeError(
                f"tokens come from slot {start} on, but {len(self._codes)} were watched: call "
                "on_forward for every pass, in order, or load the index with its state"
            )
        self._codes.put(learned.encode(keys, positions), start)
        self._fingerprint = learned.fingerprint
        self._positions = positions

    def add(self, block: TokenBlock) -> None:
        self._cold = block.end

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        budget, valid, held = cold.budget, cold.valid, len(cold)
        if len(self._codes) < held:
            raise RuntimeError(f"only {len(self._codes)} of {held} tokens were watched")
        table = self._on(query.device).table(query, self._positions, cold.scale, cold.softcap)
        codes = self._codes.rows[:, :, :held]
        group = query.shape[1] // codes.shape[1]
        if self.options.budget_of == "union" and budget < held:
            count = max(1, budget // group)
            chosen = top_k(codebook.lookup(table, codes, valid=valid), count)
            each = chosen.unflatten(1, (-1, group)).transpose(2, 3).flatten(3)
            # With a smaller budget than heads, the first of them choose.
            united = centroid.unite(each[..., :budget].contiguous(), valid)
            return torch.nn.functional.pad(united, (0, budget - united.shape[-1]), value=-1)
        relevance = codebook.lookup_scores(table, codes, valid=valid)
        return top_k(relevance, budget)

    def cost(self, n: int, budget: int) -> SearchCost:
        """Codes alone choose."""
        if self._learned is None or not len(self._codes):
            return SearchCost(0, 0)
        codes = self._codes.rows[:, :, : self._cold].nbytes
        return SearchCost(0, codes + self._learned.words.nbytes + self._learned.inverse.nbytes)

    def reset(self) -> None:
        super().reset()
        self._positions = None

    def reorder(self, rows: torch.Tensor) -> None:
        """As every state's; positions are of the newest pass alone."""
        super().reorder(rows)
        self._positions = None

    def crop(self, length: int) -> None:
        """Tokens that went back into the window keep their codes."""
        self._cold = min(self._cold, length)

    def shared_nbytes(self) -> int:
        return 0 if self._learned is None else self._learned.nbytes

    def loaded(self) -> None:
        """ValueError for codes of another artifact, or that name no codeword."""
        codes, cold = self._codes.rows, self._cold
        learned = self._on(codes.device)
        if learned.fingerprint != self._fingerprint:
            raise ValueError(
                f"the cache was saved with another artifact than {self.options.artifact} is now: "
                "its codes name other codewords. Bring that artifact back, or fill a new cache"
            )
        words, lowest, highest = learned.words.shape[1], int(codes.min()), int(codes.max())
        if not 0 <= lowest <= highest < words or codes.shape[2] < cold:
            raise ValueError(
                f"the cache was saved with codes {lowest} to {highest} of {codes.shape[2]} tokens; "
                f"there are {words} codewords and {cold} cold tokens: the file is damaged, save "
                "the cache again"
            )

    def stats(self) -> dict[str, Any]:
        """``codewords``: of a KV head, learned by calibration."""
        return {"codewords": 0 if self._learned is None else self._learned.words.shape[1]}

    def _on(self, device: torch.device) -> LearnedLayer:
        """What was learned about the layer, on ``device``; loaded when the first tokens come."""
        if self._learned is None:
            options = self.options
            if options.artifact is None:
                raise ValueError(
                    "the options name no artifact: pass A2ATSConfig(artifact='folder-or-hub-id'), "
                    "or make an A2ATSCache, which looks beside the model"
                )
            self._found = load(options.artifact, options.revision)
            self._learned = learned_layer(self._found, self.layer, device)
        return self._learned
