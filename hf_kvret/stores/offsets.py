"""Keys with an offset: a large constant that all tokens share, and that tells none from another.

The error of coded rows is a share of a key's length. Attention sees it beside what differs between
tokens. Where a model adds a large constant to its keys, as the bias of ``k_proj`` is in the first
and last layers of Qwen2 and Qwen2.5, the error drowns the differences.

RoPE turns the constant by an angle for each token, in each channel pair by another one. So over
consecutive tokens a channel shows a cosine of one frequency, near zero in slow pairs: a line in its
spectrum. What differs between tokens is spread over all frequencies. Rows that are coded around
their mean have lost the part that hardly turns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch

from hf_kvret.contracts.store import FirstRows

_log = logging.getLogger(__name__)

MOST_RATIO = 40.0
"""Largest energy of keys, in units of that of their differences, that codes are fit for."""

# A line of a spectrum under a Hann window lies in so many neighbouring frequencies.
_LINE = 5
# With fewer tokens a line can't be told from the rest; more tell nothing new.
_FEWEST_TOKENS, _MOST_TOKENS = 32, 1024
_MOST_SEQUENCES = 8


def why_in_full(first: FirstRows) -> str:
    """Why rows like these must not be coded without being asked for; empty where they may."""
    # Latents are coded as they are.
    ratio = offset_ratio(first, centered=not first.value_in_key)
    if ratio is None:
        return f"its first {_FEWEST_TOKENS - 1} tokens or fewer do not tell of offsets"
    return "its keys have a large offset" if ratio > MOST_RATIO else ""


def offset_ratio(first: FirstRows, *, centered: bool) -> float | None:
    """Energy of the keys over that of what differs between tokens, at least 1.

    ``centered``: of keys around the mean of all tokens, by channel.

    Of the KV head with the largest, by up to 1,024 tokens of 8 sequences. Infinite for tokens that
    are all alike; None for fewer than 32 in every sequence. 1 without keys, as for codes or on
    the meta device. Waits for the device.
    """
    keys = first.keys() if callable(first.keys) else first.keys
    if keys is None or keys.device.type == "meta":
        return 1.0
    energies = [_energies(some) for some in _sequences(keys, first.valid, centered)]
    if not energies:
        return None
    total, offset = (sum(energy) for energy in zip(*energies, strict=True))
    assert isinstance(total, torch.Tensor)
    # Heads of zeros have no offset.
    ratios = total / (total - offset).clamp(min=0)
    return float(ratios.nan_to_num(1.0, posinf=math.inf).max())


def _sequences(
    keys: torch.Tensor, valid: torch.Tensor | None, centered: bool
) -> Iterator[torch.Tensor]:
    """``[Hkv, n, D]`` fp32 keys of the valid tokens of each sequence with enough of them."""
    for number in range(min(len(keys), _MOST_SEQUENCES)):
        rows = keys[number] if valid is None else keys[number][:, valid[number].to(keys.device)]
        if rows.shape[1] >= _FEWEST_TOKENS:
            mean = rows.mean(1, keepdim=True, dtype=torch.float32) if centered else 0.0
            yield rows[:, :_MOST_TOKENS].float() - mean


def _energies(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[Hkv]`` each: energy of ``keys [Hkv, n, D]``, and of the strongest line of each channel."""
    count = keys.shape[1]
    window = torch.hann_window(count, device=keys.device)[:, None]
    spectrum = torch.fft.rfft(keys * window, dim=1).abs().square()
    # Frequencies between zero and the highest stand for negative ones, too.
    spectrum[:, 1 : (count + 1) // 2] *= 2
    bins = spectrum.shape[1]
    lines = spectrum.unfold(1, min(_LINE, bins), 1).sum(-1).amax(1)
    return spectrum.sum((1, 2)), lines.sum(1)


def warn_of_offset(first: FirstRows, layer: int, remedy: str, *, centered: bool) -> bool:
    """Warn if the keys of a ``layer``, which are coded, have an offset; whether it warned.

    ``remedy``: what to do then, or what is done. ``centered``: as of ``offset_ratio``.
    """
    ratio = offset_ratio(first, centered=centered)
    if ratio is None or ratio <= MOST_RATIO:
        return False
    _log.warning(
        "the keys of layer %d have a large offset that all tokens share: their energy is %.0f "
        "times that of what differs between tokens, and where it is more than %.0f times that, "
        "coded rows change answers much: %s",
        layer,
        ratio,
        MOST_RATIO,
        remedy,
    )
    return True
