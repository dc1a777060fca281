"""A2ATSIndex: one code a token, scored by looking it up (A2ATS, section 4)."""

from __future__ import annotations

from typing import Any, Self

import torch

from hf_kvret.block import TokenBlock
from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.growing import GrowingRows
from hf_kvret.index import Index
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

    def __init__(self, options: A2ATSConfig, layer: int) -> None:
        self.options, self.layer = options, layer
        self._found: CalibrationArtifact | None = None
        self._learned: LearnedLayer | None = None
        self._codes = GrowingRows()
        self._cold = 0
        # Positions [B, q] of the newest pass, whose queries are about to select.
        self._positions: torch.Tensor | None = None

    def watch(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        learned = self._on(keys.device)
        self._codes.crop(start)
        if self._codes.length != start:
            raise RuntimeError(
                f"tokens come from slot {start} on, but {self._codes.length} were watched: call "
                "watch for every pass, in order, or load the index with its state"
            )
        self._codes.append(learned.encode(keys, positions))
        self._positions = positions

    def observe(self, block: TokenBlock) -> None:
        self._cold = block.end

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        held = valid.shape[1]
        if self._codes.length < held:
            raise RuntimeError(f"only {self._codes.length} of {held} tokens were watched")
        table = self._on(query.device).table(query, self._positions, scale, softcap)
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

    def uncapturable(self) -> str | None:
        return "a2ats encodes each token to a place that the host keeps"

    def candidates(self, cold_len: int, budget: int) -> int:
        """0: codes alone choose."""
        return 0

    def reorder(self, rows: torch.Tensor) -> None:
        self._codes.reorder(rows)
        self._positions = None

    def crop(self, cold_len: int) -> None:
        # Tokens that went back into the window keep their codes; `watch` drops the others.
        self._cold = min(self._cold, cold_len)

    def fork(self) -> Self:
        twin = type(self)(self.options, self.layer)
        twin._found, twin._learned = self._found, self._learned
        twin._codes = self._codes.fork()
        twin._cold, twin._positions = self._cold, self._positions
        return twin

    def nbytes(self) -> int:
        """The codes; ``shared_nbytes`` are beside them, once for all caches."""
        return self._codes.nbytes()

    def shared_nbytes(self) -> int:
        return 0 if self._learned is None else self._learned.nbytes

    def select_nbytes(self) -> int:
        if self._learned is None or not self._codes.length:
            return 0
        held = self._codes.rows[:, :, : self._cold].nbytes
        return held + self._learned.words.nbytes + self._learned.inverse.nbytes

    def state_dict(self) -> dict[str, torch.Tensor]:
        if not self._codes.length:
            return {}
        codes = self._codes.rows.contiguous()
        learned = torch.tensor(self._on(codes.device).fingerprint)
        return {"codes": codes, "cold": torch.tensor(self._cold), "learned": learned}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        codes = state["codes"]
        if self._on(codes.device).fingerprint != int(state["learned"]):
            raise ValueError(
                f"the cache was saved with another artifact than {self.options.artifact} is now: "
                "its codes name other codewords. Bring that artifact back, or fill a new cache"
            )
        words, cold = self._on(codes.device).words.shape[1], int(state["cold"])
        if not 0 <= int(codes.min()) <= int(codes.max()) < words or codes.shape[2] < cold:
            raise ValueError(
                f"the cache was saved with codes {int(codes.min())} to {int(codes.max())} of "
                f"{codes.shape[2]} tokens; there are {words} codewords and {cold} cold tokens: the "
                "file is damaged, save the cache again"
            )
        self._codes, self._cold, self._positions = GrowingRows(), cold, None
        self._codes.append(codes)

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
