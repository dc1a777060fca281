"""Attention masks in one layout: a ``[B, T]`` view that can build the base's mask on demand.

The mask function runs once per forward pass and type of layer, before it is known which cache a
layer gets. So it returns padding as ``[B, T]`` bool (all True where there is none) with a
``MaskInfo`` attached, and the attention function takes what it needs: padding for a retrieval
layer, the base implementation's own mask for everything else.

Some models make their mask twice: an outer model hands its mask to a text model, which calls the
mask function again. transformers then keeps a finished mask, of four dims, as it is. It makes a new
one from padding, and from no mask, which sdpa has where its own causal attention is enough. The
second call has the effect here that it has on the base's mask.

A model's own indexer tells attention its choice in one of four ways. Most pass the tokens' indices
(DeepSeek-V3.2), one those of blocks (MiniMax-M3), one restricts its mask (Qwen4), and one passes
indices in its place (GLM-5.3-Flash, patched).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch._guards import TracingContext
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask

from hf_kvret.attention.base import recorded_base
from hf_kvret.models.compiled import not_compiled
from hf_kvret_model_patches.pooled_choice import mask_of_choice

_INFO = "hf_kvret_mask"
# Among the masks of bases, the one that ``seen_by_query`` gives.
_SEEN = "seen by query"
# Most models have this attention; it stands for that of a model without a record.
_DEFAULT_BASE = "sdpa"
# Building a block mask calls a compiler, so it can't be stopped on the way.
_ALWAYS_FINISHED = ("flex_attention",)

CHOICES = ("indices", "block_indices")
"""Keywords by which models pass a choice."""
# Marks of tokens that are counted at once.
_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class MaskLayout:
    """The layout of a mask.

    Attributes:
        shape: ``(B, 1, Q, T)`` of a finished mask; None where there is padding or no mask.
        padding: ``[B, T]``, of masks that are not finished; None where there is no mask.
    """

    shape: tuple[int, int, int, int] | None = None
    padding: torch.Tensor | None = None


@dataclass
class MaskInfo:
    """Data attached to a carrier tensor.

    Attributes:
        padding: ``[B, T]`` bool as the caller gave it, or None when nothing is padded.
        causal: True when the mask function is that of plain causal attention, plus padding.
        arguments: what transformers passed to the mask function.
        query_len: newest queries that the mask was cut to; None: it has all.
        chosen: ``[B, H or 1, Q, T]`` bool, what the model lets its queries see of what this mask
            shows; None: all.
    """

    padding: torch.Tensor | None
    causal: bool
    arguments: dict[str, Any]
    query_len: int | None = None
    chosen: torch.Tensor | None = None
    _base_masks: dict[tuple[str, torch.device], torch.Tensor | None] = field(default_factory=dict)

    def for_base(self, base: str, device: torch.device) -> torch.Tensor | None:
        """The mask that ``base`` expects, on ``device``; made once per forward pass."""
        if (base, device) not in self._base_masks:
            make = ALL_MASK_ATTENTION_FUNCTIONS.get(base)
            # With no mask, sdpa would assume as many queries as there were before a cut.
            arguments = self.arguments if self.query_len is None else self._without_skip
            mask = None if make is None else make(**arguments)
            if self.query_len is not None and mask is not None:
                if not isinstance(mask, torch.Tensor):
                    raise ValueError(
                        f"attn_implementation={base!r} has masks that can't be cut to some "
                        "queries, as this model does: load it with attn_implementation='sdpa'"
                    )
                mask = mask[:, :, -self.query_len :] if mask.ndim == 4 else mask
            moved = mask.to(device) if isinstance(mask, torch.Tensor) else mask
            if self.chosen is not None:
                whole = _whole_mask(moved, self, base, device)
                moved = _with_chosen(whole, self.chosen.to(device))
            self._base_masks[base, device] = moved
        return self._base_masks[base, device]

    @property
    def _without_skip(self) -> dict[str, Any]:
        """The arguments of a mask that is there, also where sdpa needs none."""
        return {**self.arguments, "allow_is_causal_skip": False}

    @cached_property
    def layout(self) -> MaskLayout:
        """The layout of the mask that the model's own attention would have made."""
        if self.query_len is None:
            return base_layout(self.arguments)
        batch, total = (self.arguments[name] for name in ("batch_size", "kv_length"))
        return MaskLayout((batch, 1, self.query_len, total))

    @cached_property
    def starts_padded(self) -> bool:
        """Whether a row begins with padding; may wait for the device, once a pass."""
        return self.padding is not None and not bool(self.padding[:, 0].all())

    @cached_property
    def lets_see_as_causal(self) -> bool:
        """Whether queries see what plain causal attention shows them, by whatever function.

        A model for images and text may ask by another one where there is text alone.
        """
        arguments = self._without_skip
        plain = {**arguments, "mask_function": causal_mask_function, "local_size": None}
        return self.causal or torch.equal(sdpa_mask(**arguments), sdpa_mask(**plain))

    def seen_by_query(self, device: torch.device) -> torch.Tensor:
        """``[B, 1, Q, T]`` bool: what each query sees under this mask; made once a pass."""
        if (_SEEN, device) not in self._base_masks:
            mask = sdpa_mask(**self._without_skip).to(device)
            mask = mask if self.query_len is None else mask[:, :, -self.query_len :]
            self._base_masks[_SEEN, device] = mask
        seen = self._base_masks[_SEEN, device]
        assert seen is not None, "made above"
        return seen


class _FinishedError(Exception):
    """A mask function begins to build a mask of four dims."""


def base_layout(arguments: dict[str, Any]) -> MaskLayout:
    """The layout of the mask that the model's own attention would make; no mask is built.

    As transformers itself, it looks at the values of padding, where these decide.

    Args:
        arguments: what transformers passes to a mask function.
    """
    config = arguments.get("config")
    base = (None if config is None else recorded_base(config)) or _DEFAULT_BASE
    batch, new, total = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    finished = MaskLayout((batch, 1, new, total))
    if base in _ALWAYS_FINISHED:
        return finished
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(base)
    if make is None:
        return MaskLayout()
    try:
        # A mask of four dims is made of what the function says of each query and key.
        padding = make(**{**arguments, "mask_function": _stop})
    except _FinishedError:
        return finished
    return MaskLayout(padding=padding)


def _stop(*indices: Any) -> NoReturn:
    raise _FinishedError


def retrieval_mask(**arguments: Any) -> torch.Tensor:
    """The mask function registered beside our attention function.

    Args:
        arguments: those of transformers' own mask functions, which it passes by name;
            ``attention_mask`` is ``[B, T]`` bool, None, or what an earlier call returned.

    Returns:
        ``[B, kv_length]`` bool, a view, with its ``MaskInfo`` attached; asked for its shape it
        gives that of the base's mask.
    """
    attention_mask = arguments.get("attention_mask")
    earlier = mask_info(attention_mask)
    if earlier is not None:
        if earlier.layout.shape is not None:
            return attention_mask  # type: ignore[return-value]
        attention_mask = earlier.layout.padding
    arguments = {"mask_function": causal_mask_function, **arguments}
    arguments["attention_mask"] = attention_mask
    if isinstance(arguments.get("q_offset"), torch.Tensor):
        # A static cache passes its own counter, and advances it before the base's mask is made.
        arguments["q_offset"] = arguments["q_offset"].clone()
    kv_length, kv_offset = arguments["kv_length"], arguments.get("kv_offset", 0)
    padding = None if attention_mask is None else attention_mask.to(torch.bool)
    if padding is None:
        # One element in memory, however long the text is.
        one = torch.ones((), dtype=torch.bool, device=arguments.get("device", "cpu"))
        carrier = one.expand(arguments["batch_size"], kv_length)
    else:
        pad_len = kv_offset + kv_length - padding.shape[1]
        padded = torch.nn.functional.pad(padding, (0, pad_len)) if pad_len > 0 else padding
        carrier = padded[:, kv_offset : kv_offset + kv_length].contiguous()
        # A new view: several types of layer may share the padding tensor, each with its own info.
        carrier = carrier.view(carrier.shape)
    is_plain = arguments["mask_function"] is causal_mask_function
    causal = is_plain and arguments.get("local_size") is None
    carrier = carrier.as_subclass(MaskCarrier)
    setattr(carrier, _INFO, MaskInfo(padding, causal, arguments))
    return carrier


class MaskCarrier(torch.Tensor):
    """A ``[B, T]`` mask whose copies keep the ``MaskInfo``: device maps copy it between devices.

    It stands for a mask that depends on the base, so computing with it can't be right: every
    operation other than copying it, cutting it to the newest queries, asking what a query sees,
    letting it see less (``mask & chosen``), or reading its shape and the like raises ValueError.
    Its shape is that of the base's mask where that is finished: by its four dims transformers, and
    models, know a mask that they have to pass on as it is.
    """

    @classmethod
    @not_compiled
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", repr(func))
        if name == "__get__":
            name = getattr(func.__self__, "__name__", name)  # type: ignore[attr-defined]
        source = args[0] if args else None
        if name == "__getitem__":
            part = _cut_mask(source, args[1])
            if part is not None:
                return part
        if name == "__and__":
            part = _restricted(source, args[1])
            if part is not None:
                return part
        if name not in _COPIES and name not in _METADATA:
            raise ValueError(
                f"this model computes with its attention mask ({name}), which a retrieval cache "
                "replaces by its own format: use cache_implementation='dynamic', after "
                "hf_kvret.restore(model) where the model was attached, and report the model"
            )
        # torch.compile needs the dims that the memory of a tensor has.
        is_traced = torch.compiler.is_compiling() or TracingContext.try_get() is not None
        info = mask_info(source) if name in _DIMS and not is_traced else None
        if info is not None and info.layout.shape is not None:
            whole = torch.empty((), device="meta").expand(info.layout.shape)
            return func(whole, *args[1:], **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls) and isinstance(source, cls):
            result.__dict__.setdefault(_INFO, source.__dict__.get(_INFO))
        return result


# Operations that return the same mask.
_COPIES = frozenset({"to", "cpu", "cuda", "clone", "detach", "contiguous", "data", "pin_memory"})
# Operations that read how many elements there are along which dim.
_DIMS = frozenset({"shape", "size", "dim", "ndim", "numel", "nelement", "__len__"})
# Operations that read metadata and never the values.
_METADATA = _DIMS | frozenset(
    {
        *("stride", "is_contiguous"),
        *("dtype", "itemsize", "element_size", "nbytes", "is_floating_point", "is_complex"),
        *("device", "get_device", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_pinned"),
        *("layout", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_sparse_csr"),
        *("requires_grad", "grad", "grad_fn", "is_leaf", "is_inference", "_version"),
        *("data_ptr", "untyped_storage", "storage_offset", "__hash__", "__repr__"),
        "__format__",
        *("_is_view", "_base", "is_conj", "is_neg", "record_stream"),
    }
)


def _cut_mask(mask: Any, index: Any) -> torch.Tensor | None:
    """``mask[:, 0]`` or ``mask[b, 0, q]``, finished, or ``mask[:, :, -count:]``; else None."""
    info, everything = mask_info(mask), slice(None)
    if info is None or not isinstance(index, tuple) or not 2 <= len(index) <= 4:
        return None
    if info.chosen is not None:
        return None
    if type(index[1]) is int and index[1] == 0:
        if any(type(one) is not int and one != everything for one in index):
            return None
        return info.seen_by_query(mask.device)[index]
    if len(index) == 2:
        return None
    *others, queries = index[:2] + index[3:] + index[2:3]
    if not isinstance(queries, slice) or any(one != everything for one in others):
        return None
    length = info.arguments["q_length"] if info.query_len is None else info.query_len
    start, stop, step = queries.indices(length)
    if stop != length or step != 1 or start == stop:
        return None
    cut = mask.detach()
    setattr(cut, _INFO, replace(info, query_len=length - start, _base_masks={}))
    return cut


def _restricted(mask: Any, chosen: Any) -> torch.Tensor | None:
    """``mask & chosen``, of ``chosen [B, H or 1, Q, T]`` bool; None for anything else."""
    info = mask_info(mask)
    if info is None or info.chosen is not None or not isinstance(chosen, torch.Tensor):
        return None
    if chosen.dtype != torch.bool or chosen.ndim != 4 or isinstance(chosen, MaskCarrier):
        return None
    part = mask.detach()
    setattr(part, _INFO, replace(info, chosen=chosen, _base_masks={}))
    return part


def mask_info(mask: torch.Tensor | None) -> MaskInfo | None:
    """The ``MaskInfo`` that ``retrieval_mask`` attached to ``mask``; None for other masks."""
    return getattr(mask, _INFO, None)


def base_mask(mask: torch.Tensor | None, base: str, device: torch.device) -> torch.Tensor | None:
    """``mask`` as the implementation ``base`` expects it; a foreign mask is passed on.

    Raises:
        ValueError: a plain ``[B, T]`` mask, which ``base`` would misread.
    """
    info = mask_info(mask)
    if info is not None:
        return info.for_base(base, device)
    if (make := mask_of_choice(mask)) is not None:
        return make()
    if mask is not None and mask.ndim == 2 and not base.startswith("flash"):
        raise ValueError(
            "the model rebuilt its attention mask on the way to a layer, so it can't be read any "
            "more: call hf_kvret.restore(model) and use the model with its own cache"
        )
    return mask


def with_indices(
    mask: torch.Tensor | None, carrier: torch.Tensor | None, indices: torch.Tensor, base: str
) -> torch.Tensor:
    """The mask of ``base`` that shows each query only what its ``indices`` name.

    Args:
        mask: of ``base`` without them; None where it needs none.
        carrier: what the model was given, or None.
        indices: ``[B, H or 1, Q, K]`` integers, by query head or for all; those below 0 or from T
            on name nothing.

    Returns:
        ``[B, H or 1, Q, T]`` in the dtype of ``mask``, bool where there was none.

    Raises:
        ValueError: a base whose mask has no column for each key.
    """
    mask = _whole_mask(mask, mask_info(carrier), base, indices.device)
    total = mask.shape[3]
    chosen = torch.zeros(*indices.shape[:3], total + 1, dtype=torch.bool, device=mask.device)
    chosen.scatter_(3, indices.masked_fill((indices < 0) | (indices > total), total), True)
    return _with_chosen(mask, chosen[..., :total])


def _with_chosen(mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """``mask`` that shows each query only what is ``chosen [B, H or 1, Q, T]``."""
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _whole_mask(
    mask: torch.Tensor | None, info: MaskInfo | None, base: str, device: torch.device
) -> torch.Tensor:
    """``mask`` of ``base``, or where it needs none, what queries see; ValueError: not by key."""
    if mask is None and info is not None and base in ("sdpa", "eager"):
        mask = info.seen_by_query(device)
    if mask is None or mask.ndim != 4:
        raise ValueError(
            f"attn_implementation={base!r} has no mask for tokens that an indexer chose: load the "
            "model with attn_implementation='sdpa'"
        )
    return mask


def token_validity(
    mask: torch.Tensor | None, new: int, total: int, device: torch.device, may_choose: bool = False
) -> torch.Tensor | None:
    """``[B, total]`` bool validity of all tokens, from the mask passed to a retrieval layer.

    Args:
        mask: our carrier, or None (no mask function ran: nothing is padded), or a choice, which
            names no padding.
        new: number of new queries.
        total: number of tokens, the new ones included.
        device: where the layer's tokens are.
        may_choose: whether the layer follows what the model chooses to see.

    Raises:
        ValueError: a mask of another shape or length; the message says what to pass.
    """
    if mask is None:
        return None
    info = mask_info(mask)
    if info is None:
        if may_choose and mask_of_choice(mask) is not None:
            return None
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} and dtype {mask.dtype} reached a "
            "retrieval layer: pass a 2D mask [batch, all tokens so far] (1 = token, 0 = padding); "
            "custom 4D masks are not supported with a retrieval cache"
        )
    if info.chosen is not None and not may_choose:
        raise ValueError(
            "this model restricts by itself what its attention sees, which this cache does not "
            "follow: take cache_implementation='native' where the model has an indexer, else "
            "'dynamic'"
        )
    if not info.causal and new == 1:
        return info.seen_by_query(device)[:, 0, -1]
    if total > new and not info.lets_see_as_causal:
        raise ValueError(
            "this model asks for attention that is not plain causal (image tokens, packed "
            f"sequences) among {new} new tokens behind {total - new} cached ones: give the whole "
            "prompt in one forward pass, without drafts"
        )
    if info.padding is not None and info.padding.shape[1] != total:
        raise ValueError(
            f"attention_mask has {info.padding.shape[1]} columns, the cache holds {total} tokens "
            "with the new ones: pass one column for every token, past and new"
        )
    return None if info.padding is None else info.padding.to(device)


def chosen_tokens(
    module: Any, mask: torch.Tensor | None, keywords: Mapping[str, Any]
) -> torch.Tensor | None:
    """``[B, Hkv or 1, Q, K]`` int64 tokens by query, -1 for none; None: nothing was chosen.

    Args:
        module: the attention of a layer.
        mask: what the model passed as its mask.
        keywords: what it passed beside.

    Raises:
        ValueError: blocks of a batch that begins with padding.
    """
    info = mask_info(mask)
    if (passed := passed_choice(module, keywords)) is not None:
        if keywords.get("block_indices") is not None and info is not None and info.starts_padded:
            raise ValueError(
                "this model counts its blocks from the first token index, and its queries' blocks "
                "from the first token, so behind padding it chooses others, or none: give it "
                "prompts of one length, or one at a time"
            )
        return passed
    if mask is not None and mask_of_choice(mask) is not None:
        return _without_repeats(mask.long())[:, None]
    return None if info is None or info.chosen is None else _marked(info.chosen)


def passed_choice(module: Any, keywords: Mapping[str, Any]) -> torch.Tensor | None:
    """As ``chosen_tokens``, of a choice among ``keywords``."""
    indices, blocks = (keywords.get(name) for name in CHOICES)
    if indices is not None:
        return indices.long()[:, None]
    if blocks is None:
        return None
    size = module.indexer.block_size
    tokens = blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)
    return tokens.masked_fill(blocks.unsqueeze(-1) < 0, -1).flatten(-2)


def _without_repeats(ids: torch.Tensor) -> torch.Tensor:
    """``ids [B, Q, K]`` in order, -1 in place of those that come again.

    Behind padding in the middle of a text the tail of GLM-5.3-Flash has tokens of its pools.
    """
    ids = ids.sort(-1).values
    repeats = ids[..., 1:] == ids[..., :-1]
    return ids.masked_fill(torch.nn.functional.pad(repeats, (1, 0)), -1)


def _marked(marks: torch.Tensor) -> torch.Tensor:
    """The places that are True along the last dim of ``marks [B, H, Q, T]``, some queries a time.

    Waits for the device.
    """
    most, total = int(marks.sum(-1).max()), marks.shape[-1]
    places = torch.arange(total, device=marks.device)
    step = max(1, _ELEMENTS // (marks[:, :, :1].numel()))
    parts = []
    for some in marks.split(step, dim=2):
        column = (some.cumsum(-1) - 1).masked_fill_(~some, most)
        part = torch.full((*some.shape[:3], most + 1), -1, device=marks.device)
        parts.append(part.scatter_(-1, column, places.expand_as(some))[..., :most])
    return torch.cat(parts, dim=2)
