"""A cache full of context: read through the model, or written as random keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.index import Index, Scoring
from hf_kvret.generate.attach import attach, restore
from hf_kvret.lab.bench.opponents import CppDenseCache, in_cpp
from hf_kvret.lab.bench.shapes import WeightBytes
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.study import Calibration, Corpus, calibrate
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.reader import feed
from hf_kvret.lab.evaluate.usage import Usage, usage_of
from hf_kvret.layer.indexed import IndexedLayer
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.models.compatibility import is_indexed, layer_shape

FILLS = ("auto", "prefill", "random")
# Beyond this many tokens "auto" writes random rows on an accelerator.
_LONGEST_PREFILL = 16_384
_PROBE_LEN = 64
# Text models that keep the positions of all tokens with the first of their indexers.
_KEEP_POSITIONS = ("qwen4_exp_text",)


def choose_fill(
    fill: str, context: int, device: torch.device, choice: CacheChoice, latent: bool = False
) -> str:
    """``"prefill"`` or ``"random"``, as ``fill`` means it for this context and cache.

    ``latent``: the model has latent attention, whose many heads take long to read a prompt.

    Raises:
        ValueError: ``random`` for a press or a stranger, which need a prompt.
    """
    if fill == "auto":
        short = device.type == "cpu" or context <= _LONGEST_PREFILL
        return "prefill" if (short and not latent) or choice.needs_prompt else "random"
    if fill == "random" and choice.needs_prompt:
        raise ValueError(
            f"{choice.name} acts while it reads a prompt, so its cache can't be filled with "
            "random rows: use --fill prefill or auto"
        )
    return fill


@contextmanager
def serving(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """``model`` with the attention that ``cache`` needs: ours for retrieval, else its own.

    CheckFailed for what is no cache, as a function in the place of ``generate``.
    """
    if not hasattr(cache, "update"):
        raise CheckFailed("it answers by itself: only tasks of eval that ask for answers take it")
    if isinstance(cache, CppDenseCache):
        with in_cpp(model):
            yield
    elif isinstance(cache, RetrievalCache):
        attach(model)
        try:
            yield
        finally:
            restore(model)
    else:
        yield


def random_tokens(model: PreTrainedModel, batch: int, length: int, seed: int) -> torch.Tensor:
    """``[batch, length]`` token ids on the model's device, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    return torch.randint(vocabulary, (batch, length), generator=generator).to(model.device)


@dataclass(frozen=True)
class LayerRows:
    """Heads, widths, and standard deviations of the rows of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    key_scale: float
    value_scale: float


@torch.inference_mode()
def measure_rows(model: PreTrainedModel, seed: int) -> list[LayerRows]:
    """The shape and scale of the rows that the model makes of a prompt of 64 random tokens.

    Raises:
        ValueError: the model has layers that hold no keys and values, as linear attention.
    """
    cache = DynamicCache(config=model.config)
    feed(model, cache, random_tokens(model, 1, _PROBE_LEN, seed), 0)
    rows = []
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise ValueError(
                f"layer {number} of this model holds no keys and values that random rows could "
                "stand for: use --fill prefill"
            )
        scales = float(keys.float().std()), float(values.float().std())
        rows.append(LayerRows(keys.shape[1], keys.shape[3], values.shape[3], *scales))
    return rows


def attend(
    layer: RetrievalLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    value_dim: int,
    positions: torch.Tensor | None = None,
) -> None:
    """Let a layer move rows on to its index and store, as a prompt's attention does.

    The attention over the prompt itself is left out: one number stands for all its results.

    Args:
        query: ``[B, Hq, T, D]`` of the new tokens.
        keys: as ``layer.update`` returned them, like ``values``.
        value_dim: elements of a result.
        positions: ``[B, T]`` of the new tokens.
    """
    indices = None
    if isinstance(layer, IndexedLayer):
        # Only the newest query attends, to as many tokens as in use.
        query, count = query[:, :, -1:], layer.config.budget(layer.get_seq_length() + keys.shape[2])
        indices = torch.arange(count, device=query.device).expand(len(query), 1, 1, -1)
    out = partial(query.new_zeros(()).expand, *query.shape[:3], value_dim)
    scoring = Scoring(None, query.shape[3] ** -0.5)
    call = AttentionCall(scoring, out, positions=positions, indices=indices)
    layer.attend(query, keys, values, call)


def update_indexer(
    config: PreTrainedConfig, number: int, layer: Any, make: Callable[..., torch.Tensor]
) -> None:
    """Give layer ``number`` keys of its indexer, if any; ``make(dim)`` is ``[B, T, dim]``."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "indexer_types", None)
    if not is_indexed(layer) or (kinds and kinds[number] == "shared"):
        return
    keys = make(getattr(text, "indexer_head_dim", None) or text.index_head_dim)
    if hasattr(layer, "update_indexer"):
        layer.update_indexer(keys)
    else:
        layer.update_index(keys[:, None])
    if text.model_type in _KEEP_POSITIONS and number == text.layer_types.index("indexed_attention"):
        positions = torch.arange(keys.shape[1], device=keys.device)
        layer.indexer_position_ids = positions.expand(3, len(keys), -1)


@torch.inference_mode()
def fill_randomly(
    config: PreTrainedConfig,
    cache: Cache,
    layers: Sequence[LayerRows],
    batch: int,
    context: int,
    seed: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Write ``context`` normal rows of each layer's scale into every layer of an empty cache.

    They go in as a prompt's do, one layer after another: through ``cache.update``, and for a
    retrieval layer also through ``attend``. Queries are as large as keys; where an index looks at
    none, all tokens share one, which takes next to no memory. The same seed gives the same rows to
    every cache.
    """
    generator = torch.Generator(device=device)
    positions = torch.arange(context, device=device).expand(batch, -1)

    def rows(number: int, count: int, dim: int, scale: float, length: int) -> torch.Tensor:
        generator.manual_seed(seed + number)
        shape = (batch, count, length, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    for number, (layer, like) in enumerate(zip(cache.layers, layers, strict=True)):
        keys = rows(3 * number, like.kv_heads, like.key_dim, like.key_scale, context)
        values = rows(3 * number + 1, like.kv_heads, like.value_dim, like.value_scale, context)
        keys, values = cache.update(keys, values, number)
        some = partial(rows, 3 * number + 2, 1, scale=1.0, length=context)
        update_indexer(config, number, layer, lambda dim, some=some: some(dim)[:, 0])
        if isinstance(layer, RetrievalLayer):
            assert layer.kv is not None, "an update makes it"
            index = layer.kv.index
            learns = index is not None and type(index).on_forward is not Index.on_forward
            count = context if learns else 1
            # A row of the window may have more elements than a key, and a query as many.
            heads, dim = layer_shape(config, number).heads, layer.kv.window.keys.shape[3]
            query = rows(3 * number + 2, heads, dim, like.key_scale, count)
            query = query.expand(-1, -1, context, -1)
            attend(layer, query, keys, values, like.value_dim, positions)


@dataclass(frozen=True)
class BenchModel:
    """A model that is ready to be measured.

    Attributes:
        model: random weights, transformers' own sdpa attention.
        weights: bytes of its parameters.
        rows: shape and scale of random rows; None where they are not used.
        seed: of tokens and rows.
    """

    model: PreTrainedModel
    weights: WeightBytes
    rows: list[LayerRows] | None
    seed: int


@dataclass(frozen=True)
class Turn:
    """One cache at one size on one model: the unit of a round."""

    subject: BenchModel
    choice: CacheChoice
    context: int
    batch: int
    fill: str

    @contextmanager
    def filled(self, spare: int) -> Iterator[tuple[Cache, torch.Tensor]]:
        """A cache that holds the context, with room for ``spare`` more tokens, and the next one.

        That is ``[B, 1]``. Inside, the model has the attention that the cache needs.
        """
        model, seed = self.subject.model, self.subject.seed
        with ExitStack() as prompt:
            cache = prompt.enter_context(self.choice.open(model, self.context + spare))
            with serving(model, cache):
                if self.fill == "prefill":
                    tokens = random_tokens(model, self.batch, self.context, seed)
                    logits = feed(model, cache, tokens, 0)
                    prompt.close()
                    yield cache, logits[:, -1:].argmax(-1)
                    return
                assert self.subject.rows is not None
                size = self.batch, self.context, seed
                place = {"device": model.device, "dtype": model.dtype}
                fill_randomly(model.config, cache, self.subject.rows, *size, **place)
                yield cache, random_tokens(model, self.batch, 1, seed)

    def usage(self, cache: Cache, length: int) -> Usage:
        """The usage of ``cache`` after ``length`` tokens of each sequence."""
        model, on_host = self.subject.model, self.choice.on_host
        return usage_of(cache, model, length, batch=self.batch, on_host=on_host)


# Artifacts have the methods' own sizes and are made quickly: their values change no times.
_SIZES: dict[str, Calibration] = {"a2ats": A2ATSCalibration(rounds=0), "aqua": AquaCalibration()}
# Each token is a codeword of "a2ats", so that none is looked for; most models have positions for
# the length.
_TOKENS, _LENGTH = A2ATSCalibration.codewords, 2048


def make_stand_ins(
    model: PreTrainedModel, choices: Iterable[CacheChoice], folder: Path, seed: int
) -> None:
    """Make artifacts for the ``choices`` that lack one, where the model's own are looked for.

    They are learned from random tokens and kept in ``folder``, which the model's configuration
    names from then on.
    """
    lacking = {choice.method for choice in choices if choice.lacks_artifact}
    if not lacking:
        return
    model.config._name_or_path = str(folder)
    text = model.config.get_text_config(decoder=True)
    length = min(_LENGTH, getattr(text, "max_position_embeddings", None) or _LENGTH)
    texts = random_tokens(model, 1, _TOKENS, seed)[0].cpu().split(length)
    corpus = Corpus(list(texts), 0, {"text": "random tokens"})
    for method in sorted(lacking):
        with torch.inference_mode(False):
            calibrate(model, corpus, _SIZES[method], folder / method)
