"""Ways to index the keys of a layer: our methods, and what faiss has on the same keys."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from index_build_keys import RECENT, LayerKeys

from hf_kvret.cache import RetrievalCache
from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import ColdTokens, Index
from hf_kvret.core.recall import exact_scores
from hf_kvret.core.scoring import Scoring
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.stores import STORES
from hf_kvret_kernels.relevance import group_relevance

NOT_INSTALLED = "not installed: pip install faiss-cpu"
# faiss warns of fewer training points than 39 a list, which short prompts don't have.
_LEAST_POINTS = 1
_HNSW_LINKS = 32


@dataclass(frozen=True, eq=False)
class Prompt:
    """The first tokens of a layer, in a store, and the queries that come after the prompt.

    ``queries [1, Hq, n + RECENT, D]`` and ``passed [1, Hkv, n + RECENT, D]`` are the whole
    prompt's; ``keys [1, Hkv, n, D]`` are those that get an index, for the others are recent.
    ``asked [1, Hq, Q, D]`` are held out. ``cold`` has the n tokens, and the budget.
    """

    queries: torch.Tensor
    passed: torch.Tensor
    keys: torch.Tensor
    asked: torch.Tensor
    cold: ColdTokens

    @classmethod
    def of(cls, layer: LayerKeys, length: int, asked: int, top_k: int) -> Self:
        """The first ``length`` tokens of ``layer``; values are 0, as nothing here reads them."""
        keys, end = layer.keys[:, :, :length], length + RECENT
        options = CTkvrConfig(top_k=top_k, store="device")
        store = STORES[options.store](keys.device, options)
        store.append(TokenBlock(keys, keys.new_zeros(1, 1, 1, 1).expand_as(keys), start=0))
        valid = torch.ones(1, length, dtype=torch.bool, device=keys.device)
        cold = ColdTokens(store, Scoring(valid, layer.scale, layer.softcap), min(top_k, length))
        queries, later = layer.queries[:, :, : end + asked].tensor_split([end], dim=2)
        return cls(queries, layer.keys[:, :, :end], keys, later, cold)

    def __len__(self) -> int:
        return self.keys.shape[2]


class Answer(NamedTuple):
    """What an index says to queries."""

    ids: torch.Tensor
    """``[1, H, Q, k]`` int32, -1 for none; H is Hkv, or Hq where heads select for themselves."""
    compared: float
    """Keys that a query head compared exactly, or by codes; a mean."""


class Way(ABC):
    """One way to make an index of all KV heads of a layer; ``name`` is that in tables."""

    name: str

    @abstractmethod
    def prepare(self, prompt: Prompt) -> Callable[[], Any]:
        """What is timed: makes a new index of ``prompt`` whenever it is called.

        Formats are changed here, so that the time is that of the index alone.
        """

    @abstractmethod
    def ask(self, made: Any, prompt: Prompt, query: torch.Tensor) -> Answer:
        """What the index ``made`` selects for ``query [1, Hq, Q, D]``, ``cold.budget`` a query."""

    def settings(self, prompt: Prompt) -> str:
        """Sizes that were chosen for this prompt, for the table."""
        return ""


class MethodWay(Way):
    """A retrieval method of ours; ``beta`` is a share of candidates for ParisKV's schedule."""

    def __init__(
        self, cache_class: type[RetrievalCache], top_k: int, beta: float | None = None
    ) -> None:
        self.name, self._class = cache_class.name, cache_class
        self._options = cache_class.config_class.from_options(top_k=top_k, store="device")
        if beta is not None:
            assert isinstance(self._options, ParisConfig), "no other method has candidates"
            self.name = f"{self.name}, {beta:g} of all"
            self._options = self._options.with_candidates(beta)

    def check(self, head_dim: int) -> None:
        """ValueError for heads that the method has no index of."""
        self._options.check_model(head_dim)

    def prepare(self, prompt: Prompt) -> Callable[[], Index]:
        def build() -> Index:
            index = self._class.make_index(self._options, 0)
            assert index is not None, "caches without an index are no ways"
            index.on_forward(prompt.queries, prompt.passed, 0, None)
            index.add(TokenBlock(prompt.keys, prompt.keys, start=0))
            index.build(prompt.cold)
            return index

        return build

    def ask(self, made: Index, prompt: Prompt, query: torch.Tensor) -> Answer:
        cold = prompt.cold
        candidates = made.cost(len(prompt), cold.budget).candidates
        return Answer(made.search(query, cold), float(candidates))


class FaissWay(Way):
    """An index of faiss for each KV head, over inner products; on the CPU, in fp32.

    Each query head searches for ``budget`` keys, and the best of those that its group found are
    selected: by exact scores, as the exact top-k is. So what is missing was not found.

    Attributes:
        counters: faiss's, of this kind of index, with ``ndis`` and ``reset()``.
    """

    counters: ClassVar[str]

    def __init__(self, faiss: Any) -> None:
        self._faiss = faiss

    @abstractmethod
    def make(self, keys: Any) -> Any:
        """A searchable index of one head's ``keys``, a numpy array ``[n, D]`` fp32."""

    @abstractmethod
    def aim(self, index: Any, prompt: Prompt) -> None:
        """Set how much of ``index`` a query searches."""

    def prepare(self, prompt: Prompt) -> Callable[[], list[Any]]:
        heads = [keys.float().cpu().contiguous().numpy() for keys in prompt.keys[0]]
        return lambda: [self.make(keys) for keys in heads]

    def ask(self, made: list[Any], prompt: Prompt, query: torch.Tensor) -> Answer:
        budget, group = prompt.cold.budget, query.shape[1] // len(made)
        counted = getattr(self._faiss.cvar, self.counters)
        counted.reset()
        found = []
        for index, queries in zip(made, query[0].float().cpu().split(group), strict=True):
            self.aim(index, prompt)
            _, ids = index.search(queries.flatten(0, 1).contiguous().numpy(), budget)
            found.append(torch.from_numpy(ids).view(group, -1, budget))
        ids = torch.stack(found).transpose(1, 2).flatten(2)[None].to(query.device)
        compared = counted.ndis / (query.shape[1] * query.shape[2])
        return Answer(_best_found(ids, prompt, query), compared)


class InvertedLists(FaissWay):
    """IndexIVFFlat: the lists of the centroids nearest to a query are compared."""

    name = "faiss-ivf"
    counters = "indexIVF_stats"

    def lists(self, length: int) -> int:
        """How many there are for ``length`` keys: 4 times the root, faiss's own advice."""
        return min(length, math.ceil(4 * math.sqrt(length)))

    def training(self, length: int) -> dict[str, int]:
        """Options of it that are not faiss's defaults."""
        return {}

    def make(self, keys: Any) -> Any:
        faiss, (length, dim) = self._faiss, keys.shape
        lists, metric = self.lists(length), faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, metric)
        index.cp.min_points_per_centroid = _LEAST_POINTS
        for name, value in self.training(length).items():
            setattr(index.cp, name, value)
        index.train(keys)
        index.add(keys)
        return index

    def aim(self, index: Any, prompt: Prompt) -> None:
        index.nprobe = self._nprobe(prompt)

    def settings(self, prompt: Prompt) -> str:
        return f"{self.lists(len(prompt)):,} lists, {self._nprobe(prompt)} probed"

    def _nprobe(self, prompt: Prompt) -> int:
        """Lists that hold as many keys as ctkvr's do, which repeat some."""
        length, lists = len(prompt), self.lists(len(prompt))
        options = CTkvrConfig()
        recalled = options.nprobe * options.list_len(length, prompt.cold.budget)
        return min(lists, math.ceil(recalled * lists / length))


class KMeansLists(InvertedLists):
    """Lloyd's algorithm over all keys, faiss's usual 25 rounds, for as many lists as ctkvr has."""

    name = "faiss-kmeans"

    def lists(self, length: int) -> int:
        """As ctkvr has centroids."""
        return CTkvrConfig().centroids_for(length)

    def training(self, length: int) -> dict[str, int]:
        return {"niter": 25, "max_points_per_centroid": length}


class Graph(FaissWay):
    """IndexHNSWFlat with 32 links and efConstruction 40; a search keeps the budget in sight."""

    name = "faiss-hnsw"
    counters = "hnsw_stats"

    def make(self, keys: Any) -> Any:
        faiss = self._faiss
        index = faiss.IndexHNSWFlat(keys.shape[1], _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.add(keys)
        return index

    def aim(self, index: Any, prompt: Prompt) -> None:
        index.hnsw.efSearch = prompt.cold.budget

    def settings(self, prompt: Prompt) -> str:
        return f"M {_HNSW_LINKS}, efSearch {prompt.cold.budget}"


FAISS_WAYS: Mapping[str, type[FaissWay]] = {
    "ivf": InvertedLists,
    "hnsw": Graph,
    "kmeans": KMeansLists,
}
"""By the names of ``--faiss``."""


def find_faiss() -> Any | None:
    """The module, on as many threads as torch; None where it is not installed."""
    try:
        faiss = importlib.import_module("faiss")
    except ModuleNotFoundError:
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def _best_found(ids: torch.Tensor, prompt: Prompt, query: torch.Tensor) -> torch.Tensor:
    """``[1, Hkv, Q, budget]`` int32: of ``ids [1, Hkv, Q, M]``, which repeat, the best."""
    cold = prompt.cold
    relevance = group_relevance(
        exact_scores(query, prompt.keys, cold.scale, cold.softcap), ids.shape[1]
    )
    held = relevance.shape[-1]
    marks = relevance.new_zeros(*relevance.shape[:-1], held + 1, dtype=torch.bool)
    marks.scatter_(-1, ids.masked_fill(ids < 0, held), True)
    best = relevance.masked_fill(~marks[..., :held], float("-inf")).topk(cold.budget, dim=-1)
    return best.indices.to(torch.int32).masked_fill(best.values == float("-inf"), -1)
