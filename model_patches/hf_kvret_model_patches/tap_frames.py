"""Frames: what is seen of one attention layer during one forward pass, and what it adds up to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

# Largest relative difference between queries that attend and a multiple of those that RoPE gave.
_SCALED = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class LayerTokens:
    """The new tokens of one forward pass in one attention layer: n of them, in slots order.

    All tensors are the model's own, detached, in its dtype and on the layer's device: don't write
    to them, and copy what has to outlive the pass.

    Attributes:
        query_before: ``[B, Hq, n, D]`` as they enter RoPE, after a norm on queries.
        key_before: ``[B, Hkv, n, D]`` as they enter RoPE, after a norm on keys.
        query: as they enter attention; without RoPE they are ``query_before``.
        key: as they enter the cache; without RoPE they are ``key_before``.
        value: ``[B, Hkv, n, Dv]``.
        cos, sin: the tables that RoPE was given, usually ``[B or 1, n, R]``; None in a layer
            without RoPE.
        hidden: ``[B, n, hidden]``, the input of the attention module; None where it has no tensor
            as its first argument.
        position_ids: ``[B or 1, n]``, as the attention function was told; None where it was not.
            Three-part positions are not told: with images in a prompt these are not RoPE's.
        latent: the attention module, where attention is latent; else None. Then ``key`` is what the
            cache holds, rows ``[B, 1, n, rank + r]`` of a latent and a rotated key, and ``value``
            their first part; ``query`` is each head's, not absorbed. Only the last r numbers of
            rows and queries are rotated. Models may order these anew when they rotate, or scale
            queries after it: ``key_before`` and ``query_before`` are what the same order and the
            same scale would be without rotation.
    """

    query_before: torch.Tensor
    key_before: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    hidden: torch.Tensor | None
    position_ids: torch.Tensor | None
    latent: nn.Module | None = None


Callback = Callable[[int, LayerTokens], None]


class Rotation(NamedTuple):
    """Queries and keys before and after RoPE, and its tables."""

    query: torch.Tensor
    key: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    new_query: torch.Tensor
    new_key: torch.Tensor


class Frame:
    """What was seen since an attention module was entered."""

    def __init__(self, layer: int, module: nn.Module, callback: Callback, hidden: object) -> None:
        self.module = module
        self.where = f"layer {layer} ({type(module).__name__})"
        self.hidden = hidden if isinstance(hidden, torch.Tensor) else None
        self.rotation: Rotation | None = None
        self.update: tuple[torch.Tensor, torch.Tensor] | None = None
        self.attended = False
        # Before and after, of queries that were rotated by themselves.
        self._queries: tuple[torch.Tensor, torch.Tensor] | None = None
        self._report = functools.partial(callback, layer)

    def rotated(
        self,
        rotate: Callable[..., Any],
        given: inspect.BoundArguments,
        result: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Take in the ``result`` of ``rotate`` for what it was ``given``, queries and keys."""
        if self.rotation is not None:
            raise ValueError(f"{self.where} rotates twice: its keys before RoPE are not one tensor")
        self.rotation = self._rotation(rotate, given, result)
        before = self.rotation.query, self.rotation.key
        if any(old.data_ptr() == new.data_ptr() for old, new in zip(before, result, strict=True)):
            raise ValueError(
                f"{self.where} rotates in place, and queries and keys before RoPE are gone: load "
                "the model with use_kernels=False"
            )

    def rotated_apart(
        self, rotate: Callable[..., Any], given: inspect.BoundArguments, result: torch.Tensor
    ) -> None:
        """The same of a rotation that is given queries first, and keys in a second call.

        With ``unsqueeze_dim=2`` they are ``[B, n, H, D]``.
        """
        given.apply_defaults()
        arguments = given.arguments
        before = arguments.pop("x")
        if arguments.get("unsqueeze_dim") == 2:
            before, result = before.transpose(1, 2), result.transpose(1, 2)
        if self._queries is None:
            self._queries = before, result
            return
        query, new_query = self._queries
        arguments |= {"q": query, "k": before}
        self.rotated(rotate, given, (new_query, result))

    def _rotation(
        self,
        rotate: Callable[..., Any],
        given: inspect.BoundArguments,
        result: tuple[torch.Tensor, torch.Tensor],
    ) -> Rotation:
        query, key, cos, sin = (given.arguments[name] for name in ("q", "k", "cos", "sin"))
        return Rotation(query, key, cos, sin, *result)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids: torch.Tensor | None,
    ) -> None:
        """Put together what the layer was given, and report it."""
        if self.attended:
            raise ValueError(
                f"{self.where} attends twice in one pass, which a tap can't tell apart"
            )
        self.attended = True
        query_before, key_before, query, key, value = self._rows(query, key, value)
        tokens = LayerTokens(
            query_before=query_before.detach(),
            key_before=key_before.detach(),
            query=query.detach(),
            key=key.detach(),
            value=value.detach(),
            cos=None if self.rotation is None else self.rotation.cos.detach(),
            sin=None if self.rotation is None else self.rotation.sin.detach(),
            hidden=_detached(self.hidden),
            position_ids=_detached(position_ids),
            latent=self.module if isinstance(self, LatentFrame) else None,
        )
        self._report(tokens)

    def _rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The first five of ``LayerTokens``."""
        if self.update is not None:
            key, value = self.update
        else:
            self._check_new(query, key)
        if self.rotation is None and self._queries is not None:
            raise ValueError(
                f"{self.where} rotates queries and no keys: it takes them from another layer, and "
                "what they were before RoPE can't be seen; use another model, or a method without "
                "calibration"
            )
        if self.rotation is None:
            return query, key, query, key, value
        if not (_same(query, self.rotation.new_query) and _same(key, self.rotation.new_key)):
            raise self._changed()
        return self.rotation.query, self.rotation.key, query, key, value

    def _check_new(self, query: torch.Tensor, key: torch.Tensor) -> None:
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{self.where} attends to {key.shape[2]} keys with {query.shape[2]} queries and no "
                "cache was given the new ones: run the model with use_cache=False"
            )

    def _changed(self) -> ValueError:
        return ValueError(
            f"{self.where} changes queries or keys between RoPE and attention, so that rotating "
            "what entered RoPE doesn't give what attention sees, or it runs with a cache of its "
            "own: try use_cache=False, else use another model, or a method without calibration"
        )


class LatentFrame(Frame):
    """The same of a layer with latent attention, whose cache holds latents and rotated keys.

    Attributes:
        latents: what keys and values were made of.
    """

    latents: torch.Tensor | None = None

    def _rotation(
        self,
        rotate: Callable[..., Any],
        given: inspect.BoundArguments,
        result: tuple[torch.Tensor, torch.Tensor],
    ) -> Rotation:
        """Before RoPE is what ``rotate`` makes at angle 0: numbers in the order that it gives."""
        arguments = given.arguments
        if "freqs_cis" in arguments:
            table = arguments["freqs_cis"]
            cos, sin = table.real, table.imag
            arguments["freqs_cis"] = torch.ones_like(table)
        else:
            cos, sin = arguments["cos"], arguments["sin"]
            arguments |= {"cos": torch.ones_like(cos), "sin": torch.zeros_like(sin)}
        query, key = rotate(*given.args, **given.kwargs)
        return Rotation(query, key, cos, sin, *result)

    def _rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See ``LayerTokens``. Expanded keys end with the rotated one, the same in all heads."""
        module: Any = self.module
        if self.update is not None:
            latents, rotated = self.update
        elif self.latents is not None:
            self._check_new(query, key)
            latents, rotated = self.latents, key[:, :1, :, module.qk_nope_head_dim :]
        else:
            raise ValueError(
                f"{self.where} attends without having made keys of latents, and no cache was given "
                "these: run the model with use_cache=False"
            )
        row = torch.cat([latents, rotated], dim=-1)
        before = query, row
        if self.rotation is not None:
            if not torch.equal(rotated, self.rotation.new_key):
                raise self._changed()
            plain, rotary = query.split([module.qk_nope_head_dim, rotated.shape[3]], dim=-1)
            own = self.rotation.query * self._scale(rotary, self.rotation.new_query)
            before = (
                torch.cat([plain, own.to(query.dtype)], dim=-1),
                torch.cat([latents, self.rotation.key], dim=-1),
            )
        return *before, query, row, latents

    def _scale(self, query: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """``[B, 1, n, 1]`` fp32: what each token's ``rotated [B, H, n, r]`` were multiplied by."""
        wanted, given = query.float(), rotated.float()
        norm = given.square().sum((1, 3), keepdim=True).clamp(min=1e-30)
        scale = (wanted * given).sum((1, 3), keepdim=True) / norm
        missed = (wanted - scale * given).norm()
        if missed > _SCALED.get(query.dtype, 0.0) * wanted.norm():
            raise self._changed()
        # Where nothing was done, exactly nothing.
        return torch.where((wanted == given).all(3, keepdim=True).all(1, keepdim=True), 1.0, scale)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both are the same numbers in memory: one tensor, or views of one form."""
    return x is y or (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())


def _detached(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach()
