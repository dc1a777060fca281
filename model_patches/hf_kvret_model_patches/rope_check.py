"""A self-check: does our rotation reproduce what the model does, in each of its layers?"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_kvret_model_patches.rope import Rope
from hf_kvret_model_patches.taps import LayerTokens, tap_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Largest relative error by dtype of the model. In 16 bits the model itself rounds cos, sin and the
products; an error in layout, frequency or position is larger by two orders."""

_ROWS, _TOKENS, _PADDING = 2, 12, 5


def check_rope(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> dict[int, Rope]:
    """The rotation of each attention layer, by layer number, on the CPU, after a trial.

    The model runs twice over a few tokens, at its first positions and at its last. In every layer
    ``rotate`` must make queries and keys after RoPE of those before, and ``unrotate`` the other way
    round, within ``TOLERANCE``. Both layouts are tried, and the better one is returned: it counts
    more than what ``Rope.of`` reads from configuration and code. Layers that don't rotate get
    a ``Rope`` with layout ``"none"``.

    Args:
        input_ids: ``[B, n]`` integers; None for some that no model gives a meaning of its own.
        attention_mask: ``[B, n]``, 1 for tokens and 0 for padding; None for padding on the left of
            the second row, or for all tokens where ``input_ids`` are given.

    Raises:
        TypeError, ValueError, RuntimeError: as ``tap_attention``, ``Rope.of``, ``input_device``.
        ValueError: a layer that neither layout reproduces; more tokens than the model has
            positions; a dtype that has no tolerance.
    """
    text = model.config.get_text_config(decoder=True)
    ids, mask = _tokens(text.vocab_size, input_ids, attention_mask)
    device = input_device(model)
    ids, mask = ids.to(device), mask.to(device)
    first = (mask.cumsum(-1) - 1).clamp(min=0)
    limit = getattr(text, "max_position_embeddings", None) or ids.shape[1]
    if ids.shape[1] > limit:
        raise ValueError(f"{ids.shape[1]} tokens, but the model has {limit} positions: give fewer")
    trial = _Trial(model, mask.bool())
    for start in sorted({0, limit - ids.shape[1]}):
        trial.positions = first + start
        with torch.no_grad(), tap_attention(model, trial.compare):
            model(ids, attention_mask=mask, position_ids=trial.positions, use_cache=False)
    return {layer: trial.best(layer) for layer in sorted(trial.errors)}


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids belong: the device on which the model's embedding computes.

    ``model.device`` is where a weight is, and accelerate keeps the weights that it offloads on
    ``meta`` until their module runs.

    Raises:
        ValueError: the embedding is on no device, and nothing will bring it to one.
    """
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        device = getattr(candidate, "execution_device", None)
        if device is not None:
            return torch.device(device)
    device = next(embedding.parameters()).device
    if device.type == "meta":
        raise ValueError(
            "the model's embedding is on no device: load the weights, and offload with accelerate "
            "(device_map), which brings it to one"
        )
    return device


class _Trial:
    """Errors of the candidates, layer by layer; each is the largest of those that were seen."""

    def __init__(self, model: PreTrainedModel, valid: torch.Tensor) -> None:
        self.positions = torch.empty(0)
        self.errors: dict[int, dict[str, float]] = {}
        self._config = model.config
        self._valid = valid
        self._dtypes: dict[int, torch.dtype] = {}

    def compare(self, layer: int, tokens: LayerTokens) -> None:
        """Take in one layer of one pass."""
        dtype = self._dtypes[layer] = tokens.key.dtype
        if dtype not in TOLERANCE:
            dtypes = ", ".join(map(str, TOLERANCE))
            raise ValueError(f"layer {layer} computes in {dtype}: load the model in {dtypes}")
        errors = self.errors.setdefault(layer, {})
        device = tokens.key.device
        positions, valid = self.positions.to(device), self._valid.to(device)
        for layout in ("none",) if tokens.cos is None else ("half", "interleaved"):
            rope = Rope.of(self._config, layer, layout).to(device)
            worst = errors.get(layout, 0.0)
            for before, after in (
                (tokens.query_before, tokens.query),
                (tokens.key_before, tokens.key),
            ):
                there = rope.rotate(before, positions, dtype=torch.float32)
                back = rope.unrotate(after, positions, dtype=torch.float32)
                worst = max(worst, _error(there, after, valid), _error(back, before, valid))
            errors[layout] = worst

    def best(self, layer: int) -> Rope:
        """The candidate with the smallest error.

        Raises:
            ValueError: the error is above the tolerance.
        """
        errors, dtype = self.errors[layer], self._dtypes[layer]
        layout = min(errors, key=errors.__getitem__)
        if errors[layout] > TOLERANCE[dtype]:
            tried = " and ".join(f"{error:.1e} ({name})" for name, error in errors.items())
            raise ValueError(
                f"layer {layer}: rotating and un-rotating is off by {tried}, and {dtype} allows "
                f"{TOLERANCE[dtype]:.0e}. model.to(dtype) rounds the frequencies of RoPE too: load "
                "with from_pretrained(..., dtype=...) instead. If the model was loaded so, its "
                "RoPE is not the one of its config: use a method that keeps rotated keys"
            )
        return Rope.of(self._config, layer, layout)


def _error(result: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor) -> float:
    """Root mean square of the valid tokens' relative errors, ``[B, H, n, D]``; infinite for NaN.

    Not the worst token: a key that lies in one pair alone meets the roundings of 16 bits unmixed.
    One token at a wrong position still counts for more than 0.1 here.
    """
    expected = expected.float()
    difference = (result - expected).transpose(1, 2).flatten(2).norm(dim=-1)
    size = expected.transpose(1, 2).flatten(2).norm(dim=-1).clamp(min=1e-30)
    error = (difference / size)[valid].square().mean().sqrt()
    return float(error.nan_to_num(nan=float("inf")))


def _tokens(
    vocab_size: int, input_ids: torch.Tensor | None, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of the trial."""
    if input_ids is not None:
        return input_ids, torch.ones_like(input_ids) if mask is None else mask
    # Low ids are often special tokens, and those of images are where the vocabulary ends.
    ids = 10 + torch.arange(_ROWS * _TOKENS) % max(1, vocab_size - 10)
    if mask is None:
        mask = torch.ones(_ROWS, _TOKENS, dtype=torch.long)
        mask[1, :_PADDING] = 0
    return ids.view(_ROWS, _TOKENS), mask
