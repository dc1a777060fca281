"""How alike codebooks are that different inputs have of their own (A2ATS, figure 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer

from hf_kvret.calibration.k_means import k_means
from hf_kvret.compatibility import model_layers
from hf_kvret.evaluation.subject import Subject
from hf_kvret_model_patches.taps import LayerTokens, tap_attention

def likeness(
    subject: Subject,
    inputs: Mapping[str, torch.Tensor],
    codewords: int,
    *,
    rotated: bool,
    rounds: int,
    seed: int,
) -> list[dict[str, Any]]:
    """For each layer with full attention its number and ``alike``, a matrix over the inputs.

    Each input has plain codebooks of its own, one a KV head; numbers are means over KV heads.

    Args:
        inputs: token ids ``[n]`` by name, each a text of its own.
        codewords: of a codebook.
        rotated: learn from keys after RoPE instead of those before it.
        rounds: of k-means, at most.
        seed: of k-means, for all inputs the same.
    """

    def learn(keys: torch.Tensor) -> torch.Tensor:
        return k_means(keys, codewords, rounds=rounds, seed=seed)[0].cpu()

    books = [_codebooks(subject, ids, rotated, learn, name) for name, ids in inputs.items()]
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

    Args:
        first, second: ``[H, C, D]``, any float dtype; C may differ.

    Raises:
        ValueError: shapes that do not fit.
    """
    fits = first.ndim == second.ndim == 3 and first.shape[::2] == second.shape[::2]
    if not fits:
        raise ValueError(
            f"codebooks have shapes {tuple(first.shape)} and {tuple(second.shape)}: pass [H, C, D] "
            "of the same heads"
        )
    one, other = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (first, second))
    found = []
    # Head by head: all of them would take much more memory.
    for words, others in zip(one, other, strict=True):
        cosines = words @ others.T
        found.append((cosines.amax(1).mean() + cosines.amax(0).mean()) / 2)
    return torch.stack(found)


def _codebooks(
    subject: Subject,
    ids: torch.Tensor,
    rotated: bool,
    learn: Callable[[torch.Tensor], torch.Tensor],
    name: str,
) -> dict[int, torch.Tensor]:
    """``[H, C, D]`` by layer; learned while the model runs, so that keys aren't held."""
    model = subject.model
    kinds = model_layers(model.config)
    full = [layer for layer, kind in enumerate(kinds) if type(kind) is DynamicLayer]
    books: dict[int, torch.Tensor] = {}
    with tqdm(total=len(full), desc=f"codebooks of {name}", unit="layer", leave=False) as bar:

        def take(layer: int, tokens: LayerTokens) -> None:
            if layer in full:
                keys = tokens.key if rotated else tokens.key_before
                books[layer] = learn(keys[0].float())
                bar.update(1)

        with torch.no_grad(), tap_attention(model, take):
            model.get_decoder()(ids[None].to(model.device), use_cache=False)
    return dict(sorted(books.items()))
