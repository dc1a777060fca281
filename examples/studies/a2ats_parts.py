"""What A2ATS is compared with: windowed RoPE without codebooks, and codebooks of other inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer

from hf_kvret.contracts.index import ColdTokens, Estimates
from hf_kvret.lab.calibrate.k_means import k_means
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig, A2ATSIndex
from hf_kvret.models.compatibility import model_layers
from hf_kvret.observe.recall import exact_scores
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.top_k import top_k
from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.taps import LayerTokens, tap_attention


class ExactKeysIndex(A2ATSIndex):
    """Scores each token with its key in the space of the artifact, instead of its codeword.

    What A2ATS would select if its codewords lost nothing. It holds all keys once more, and every
    selection reads them.
    """

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        assert len(self._codes) >= start, "passes come in order"
        self._codes.put(self._on(keys.device).space.keys(keys, positions), start)
        self._positions = positions

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        scores = self.estimate(query, cold).logits
        return top_k(group_relevance(scores, self._codes.rows.shape[1]), cold.budget)

    def estimate(self, query: torch.Tensor, cold: ColdTokens) -> Estimates:
        keys = self._codes.rows[:, :, : len(cold)]
        seen = self._on(query.device).space.queries(query, self._positions)
        scores = exact_scores(seen, keys, cold.scale, cold.softcap)
        return Estimates(scores.masked_fill(~cold.valid[:, None, None], float("-inf")))


class ExactKeysCache(A2ATSCache):
    """``A2ATSCache`` with exact keys; KV heads choose. Of its artifact only the space counts."""

    @classmethod
    def make_index(cls, options: A2ATSConfig, layer: int) -> ExactKeysIndex:
        """A new, empty index for the model layer number ``layer``."""
        return ExactKeysIndex(options, layer)


def likeness(
    subject: Subject,
    inputs: Mapping[str, torch.Tensor],
    *,
    codewords: int,
    rotated: bool,
    rounds: int,
    seed: int,
) -> list[dict[str, Any]]:
    """For each layer with full attention its number and ``alike``, a matrix over the inputs.

    Each of the ``inputs``, token ids ``[n]`` by name, has plain codebooks of its own, one a KV
    head; numbers are means over KV heads. Keys after RoPE are learned from where ``rotated``, else
    those before it.
    """
    books = [_codebooks(subject, ids, codewords, rotated, rounds, seed) for ids in inputs.values()]
    found = []
    for layer in books[0]:
        rows = [
            [float(similarity(one[layer], other[layer]).mean()) for other in books] for one in books
        ]
        found.append({"layer": layer, "alike": rows})
    return found


def similarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``[H]`` fp32 from -1 to 1: how alike two codebooks are (A2ATS, equation 7).

    The cosine of a codeword with the nearest one of the other codebook, mean over the codewords of
    both; 1 for the same words in any order and of any length.

    Both are ``[H, C, D]``, any float dtype; C may differ.
    """
    one, other = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (first, second))
    found = []
    # Head by head: all of them would take much more memory.
    for words, others in zip(one, other, strict=True):
        cosines = words @ others.T
        found.append((cosines.amax(1).mean() + cosines.amax(0).mean()) / 2)
    return torch.stack(found)


def _codebooks(
    subject: Subject, ids: torch.Tensor, codewords: int, rotated: bool, rounds: int, seed: int
) -> dict[int, torch.Tensor]:
    """``[H, C, D]`` on the CPU by layer; learned while the model runs, so that keys aren't held."""
    model = subject.model
    kinds = model_layers(model.config)
    full = [layer for layer, kind in enumerate(kinds) if type(kind) is DynamicLayer]
    books: dict[int, torch.Tensor] = {}
    with tqdm(total=len(full), desc="codebooks", unit="layer", leave=False) as bar:

        def take(layer: int, tokens: LayerTokens) -> None:
            if layer in full:
                keys = (tokens.key if rotated else tokens.key_before)[0].float()
                books[layer] = k_means(keys, codewords, rounds=rounds, seed=seed)[0].cpu()
                bar.update(1)

        with torch.no_grad(), tap_attention(model, take):
            decoder_of(model)(ids[None].to(model.device), use_cache=False)
    return dict(sorted(books.items()))
