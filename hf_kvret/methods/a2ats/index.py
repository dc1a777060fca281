"""A2ATSIndex: a codeword for every key before RoPE, scored by table lookup (A2ATS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from hf_kvret.artifacts.shared import ArtifactConfig
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import number, transient
from hf_kvret.contracts.token_buffer import TokenBuffer, passed
from hf_kvret.methods.a2ats.learned import METHOD, LearnedLayer, check_artifact, learned_layer
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.options.declare import OneOf, option
from hf_kvret_kernels import centroid, codebook
from hf_kvret_kernels.host_step import CodebookSearch, HostSearch
from hf_kvret_kernels.top_k import top_k


@dataclass(frozen=True)
class A2ATSConfig(ArtifactConfig):
    """A2ATS's options beside those of every retrieval cache that needs an artifact.

    Attributes:
        budget_of: who chooses. ``"head"``: a KV head takes the best tokens, by the largest softmax
            weight that one of its G query heads gives them. ``"union"``: each query head chooses
            ``budget // G`` tokens, and the group attends to all of them, as published.
    """

    method: ClassVar[str] = METHOD
    # Each query head chooses 3% (table 3): ``top_k`` is for the four of a group of the models
    # there, others need 0.03 * G. The window, w of section 5.1, has 64 tokens at any time.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "budget_of": "union",
            "top_k": 0.12,
            "sink": 4,
            "recent": 64,
            "flush": 1,
            "dense_below": 0,
            "rest": None,
        }
    }

    top_k: int | float | None = 0.06
    recent: int = 64
    budget_of: str = option("head", OneOf("head", "union"))


class A2ATSIndex(Index):
    """Two bytes a token and KV head: the codeword that is nearest to its key before RoPE.

    A step multiplies the query, rotated to a fixed distance, with the codewords, and looks up the
    score of every token. Tokens are encoded on arrival, so codes of recent tokens are here, too.

    Args:
        options: with an artifact.
        layer: number of the layer in the model.
    """

    capture_obstacle = "a2ats appends the code of each token at a position that the host computes"

    _codes: TokenBuffer = passed(dims="B H t", dtype=torch.int16)
    _cold: int = number(0)
    # The fingerprint of the codebook makes sure that a saved cache is loaded with the same one.
    _fingerprint: int = number(0, key="learned")
    # The positions [B, q] of the queries that are about to select.
    _positions: torch.Tensor | None = transient()

    def __init__(self, options: A2ATSConfig, layer: int) -> None:
        self.options, self.layer = options, layer
        self._quantizer: LearnedLayer | None = None

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        quantizer = self._on(keys.device)
        assert start <= len(self._codes), "every pass is seen, in order"
        self._codes.put(quantizer.encode(keys, positions), start)
        self._fingerprint = quantizer.fingerprint
        self._positions = positions

    def on_reader(self, positions: torch.Tensor | None) -> None:
        self._positions = positions

    def add(self, block: TokenBlock) -> None:
        self._cold = block.end

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        budget, valid = cold.budget, cold.valid
        table, codes = self._scores(query, cold)
        if self._unites(cold):
            group = query.shape[1] // codes.shape[1]
            count = max(1, budget // group)
            # Each query head selects alone; the choices of a group are then united.
            ids = top_k(codebook.lookup(table, codes, valid=valid), count)
            each = ids.unflatten(1, (-1, group)).transpose(2, 3).flatten(3)
            # With a budget below the number of heads, only the first heads choose.
            union = centroid.unite(each[..., :budget].contiguous(), valid)
            return torch.nn.functional.pad(union, (0, budget - union.shape[-1]), value=-1)
        relevance = codebook.lookup_scores(table, codes, valid=valid)
        return top_k(relevance, budget)

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch | None:
        """See ``Index.host_search``: where a group has one budget."""
        return None if self._unites(cold) else CodebookSearch(*self._scores(query, cold))

    def _unites(self, cold: ColdTokens) -> bool:
        """Whether heads of a group choose for themselves, and attend to what any has chosen."""
        return self.options.budget_of == "union" and cold.budget < len(cold)

    def _scores(self, query: torch.Tensor, cold: ColdTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores ``[B, Hq, Q, C]`` fp32 of codewords, and codes ``[B, Hkv, n]`` of the tokens."""
        table = self._on(query.device).table(query, self._positions, cold.scale, cold.softcap)
        return table, self._codes.rows[:, :, : len(cold)]

    def cost(self, n: int, budget: int) -> SearchCost:
        """No candidates: codes alone decide."""
        if self._quantizer is None or not len(self._codes):
            return SearchCost(0, 0)
        codes = self._codes.rows[:, :, : self._cold].nbytes
        return SearchCost(0, codes + self._quantizer.words.nbytes + self._quantizer.inverse.nbytes)

    def crop(self, length: int) -> None:
        """Tokens that return to the window keep their codes."""
        self._cold = min(self._cold, length)

    def shared_nbytes(self) -> int:
        return 0 if self._quantizer is None else self._quantizer.nbytes

    def loaded(self) -> None:
        """ValueError for codes of another artifact."""
        quantizer = self._on(self._codes.rows.device)
        if quantizer.fingerprint != self._fingerprint:
            raise ValueError(
                f"the cache was saved with another artifact than {self.options.artifact} is now: "
                "its codes name other codewords. Bring that artifact back, or fill a new cache"
            )

    def stats(self) -> dict[str, Any]:
        """``codewords``: of a KV head, learned by calibration."""
        return {"codewords": 0 if self._quantizer is None else self._quantizer.words.shape[1]}

    def _on(self, device: torch.device) -> LearnedLayer:
        """The layer's codebook and metric on ``device``, loaded at first use."""
        if self._quantizer is None:
            artifact = self.options.load()
            self._quantizer = learned_layer(artifact, self.layer, device, self.kv_heads)
        return self._quantizer


class A2ATSCache(RetrievalCache):
    """Attends to the tokens whose codewords score best; needs a calibration artifact (A2ATS).

    ``A2ATSCache(config=model.config, artifact="folder-or-hub-id")``. The published attention on the
    CPU is ``store="cpu"``, for this and every other method.
    """

    name: ClassVar[str] = METHOD
    Config: ClassVar[type[RetrievalConfig]] = A2ATSConfig
    needs_artifact: ClassVar[bool] = True

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> A2ATSConfig:
        """``options`` with the model's artifact, which must have been made for this architecture.

        Raises:
            OSError, ValueError: no artifact, a damaged one, or that of another model; a model whose
                rotation can't be undone.
        """
        options = super().options_for(options, config).located(config)
        check_artifact(options.load(), config)
        return options

    @classmethod
    def make_index(cls, options: A2ATSConfig, layer: int) -> A2ATSIndex:
        """A new, empty index for the model layer number ``layer``."""
        return A2ATSIndex(options, layer)
