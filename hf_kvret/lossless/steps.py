"""LosslessSteps: decode steps whose logits are full attention's, most of them read ahead."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_kvret.cache import RetrievalCache
from hf_kvret.layer.foreign_layers import is_known
from hf_kvret.layer.hybrid import foreign_layers_of, is_recurrent, recording, stop_recording
from hf_kvret.lossless.pace import FastestPace, Pace
from hf_kvret.models.exact_chunks import Span, why_whole
from hf_kvret.models.versions import cache_argument

# Arguments of a step that have a column for each of its tokens.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


Guess = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of the ids so far ``[1, n]`` and logits ``[1, V]``: the token ``[1, 1]``, and the scores."""


def greedy(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token with the largest logit."""
    return logits.argmax(dim=-1, keepdim=True), logits


class LosslessSteps:
    """Calls a model as ``model(...)`` does; its logits are those of attention to all tokens.

    A step of one token begins a round: steps with retrieval draft the tokens that will come, and
    one pass that attends to everything gives the logits behind all of them. Later steps get theirs
    from that pass, as long as the caller's tokens are those that were drafted. What differs is
    dropped. A recurrent state then goes back to where the round began, and one more pass reads
    again what was accepted. ``generate`` uses all this by itself, see the option ``lossless``. In
    your own loop:

        cache = hf_kvret.ParisKVCache(model.config, lossless=True)
        logits = model(input_ids=prompt, past_key_values=cache).logits
        with hf_kvret.LosslessSteps(model, cache) as step:
            for position in range(prompt.shape[1], length):
                token = logits[:, -1:].argmax(-1)
                logits = step(input_ids=token, past_key_values=cache).logits

    Inside of ``with`` the cache holds tokens that were read ahead, so it must not be changed, and
    other passes raise. At its end it holds what the caller has read, as if full attention had read
    it.

    Args:
        model: switched to our attention (``hf_kvret.attach``).
        cache: with ``lossless=True``; the one that every call gets.
        guess: which token the caller will choose; by default that with the largest logit.
        pace: how many tokens a round drafts; by default what has been fastest.
        confidence: a draft ends behind a token of a lower probability; 0 to 1.
        limit: gives the most tokens that are worth a draft; None: there is no end in sight.

    Raises:
        TypeError: a cache of another class.
        ValueError: a cache without ``lossless``, or a model whose passes of several tokens are not
            its steps of one; see ``why_not``; a ``confidence`` out of its range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RetrievalCache,
        *,
        guess: Guess = greedy,
        pace: Pace | None = None,
        confidence: float = 0.0,
        limit: Callable[[], int] | None = None,
        step: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(cache, RetrievalCache):
            raise TypeError(f"cache is a {type(cache).__name__}: make one, as ParisKVCache")
        if not cache.options.lossless:
            raise ValueError("the cache was made without lossless=True: cache.fork(lossless=True)")
        if (why := why_not(model, cache)) is not None:
            raise ValueError(f"lossless=True: {why} ({type(model).__name__}); leave it out")
        if not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
            raise ValueError(f"a confidence of {confidence!r}: give a number from 0 to 1")
        self._model, self._cache = model, cache
        self._draft_step = model if step is None else step
        self._guess, self._confidence, self._limit = guess, confidence, limit
        self._pace = FastestPace() if pace is None else pace
        self._round: _Round | None = None
        # The caller had these keep the past, and crops them.
        self._recording = recording(cache.layers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, **inputs: Any) -> Any:
        """The model's output for ``inputs``, the keywords of its forward pass.

        Raises:
            RuntimeError: the cache was changed since the last step.
            ValueError: ``return_dict=False``, or an input whose result would count a whole round:
                ``labels``, ``output_router_logits``.
        """
        if inputs.get("return_dict") is False:
            raise ValueError("return_dict=False: leave it out, logits are read by their name")
        for name in ("labels", "output_router_logits"):
            if inputs.get(name) is not None and inputs[name] is not False:
                raise ValueError(f"{name} would count all tokens of a round: leave it out")
        ids, is_ours = inputs.get("input_ids"), cache_argument(inputs) is self._cache
        # A round begins with one token of one sequence.
        if not is_ours or not isinstance(ids, torch.Tensor) or ids.shape != (1, 1):
            self.close()
            return self._model(**inputs)
        if self._round is not None and self._round.edits == self._edits():
            output = self._round.next(inputs)
            if output is not None:
                return output
        self.close()
        if self._cache.stack.has_read_ahead:
            raise RuntimeError("other LosslessSteps have read ahead with this cache: close() them")
        return self._begin(inputs)

    def close(self) -> None:
        """Drop what was read ahead; the cache may be changed again.

        Raises:
            RuntimeError: it was changed before, so nobody knows what it holds.
        """
        ended, self._round = self._round, None
        if ended is None:
            return
        if ended.edits != self._edits():
            raise RuntimeError(
                "the cache was changed while LosslessSteps had read ahead: call close() before; "
                "now start with a new cache or cache.reset()"
            )
        self._cache.stack.has_read_ahead = False
        surplus = len(ended.tokens) - ended.used
        if surplus:
            self._go_back(ended, surplus)
        self._cache.snapshots.pinned = None
        stop_recording(self._cache.layers, but=self._recording)
        for layer in self._cache.retrieval_layers:
            layer.end_round(ended.used)
        drafted, accepted = len(ended.tokens) - 1, ended.used - 1
        self._cache.rounds.add(drafted, accepted, ended.draft_s, ended.exact_s)
        self._pace.learn(drafted, accepted, ended.draft_s, ended.exact_s)

    def _go_back(self, ended: _Round, surplus: int) -> None:
        """Drop the newest ``surplus`` tokens of a round, and read again what went with them.

        Where that breaks off, the cache is as before the round, or as at a snapshot before.
        """
        began, used = time.perf_counter(), len(ended.tokens) - surplus
        start = self._cache.get_seq_length() - len(ended.tokens)
        # Tensors of inference mode can be written to in that mode alone.
        with torch.inference_mode(ended.is_inference), torch.no_grad():
            try:
                if self._cache.drop_newest(-surplus):
                    self._verify(ended.inputs, ended.tokens[:used])
                    ended.exact_s += time.perf_counter() - began
            except BaseException:
                self._drop(start)
                raise

    def _begin(self, inputs: dict[str, Any]) -> Any:
        """The first step of a round; with nothing to draft a round is this step alone."""
        cache = self._cache
        start, count = cache.get_seq_length(), self._count()
        tokens, draft_s = [int(inputs["input_ids"])], 0.0
        began = time.perf_counter()
        try:
            self._keep_states(start, records=count > 0)
            if count:
                tokens += self._draft(inputs, count)
                draft_s = time.perf_counter() - began
            output = self._verify(inputs, tokens)
        except BaseException:
            self._drop(start)
            raise
        exact_s = time.perf_counter() - began - draft_s
        self._round = _Round(tokens, inputs, output, self._edits(), draft_s, exact_s)
        self._cache.stack.has_read_ahead = len(tokens) > 1
        return self._round.output(0)

    def _keep_states(self, start: int, records: bool) -> None:
        """Have layers of transformers come back to ``start`` tokens: by their past, or by a copy.

        ``records``: there will be drafts, so those that can record their past.
        """
        foreign = foreign_layers_of(self._cache.layers)
        for layer in foreign.values():
            if records and not is_recurrent(layer) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        if start and any(map(is_recurrent, foreign.values())):
            self._cache.snapshots.pin(start, foreign)

    def _count(self) -> int:
        """How many tokens to draft."""
        layers, options = self._cache.retrieval_layers, self._cache.options
        most = options.max_draft if self._limit is None else min(options.max_draft, self._limit())
        # Its rotations may be others for a pass that reaches beyond some length.
        start = self._cache.get_seq_length()
        span = Span(past_len=start, chunk_end=start + 1, end=start + options.max_draft + 1)
        selects = [layer.cold_len > options.budget(layer.cold_len) for layer in layers]
        # A step that selects nothing is as exact as any; the first one may follow a loaded cache.
        if not any(selects) or not all(layer.is_ready for layer in layers):
            return 0
        return self._pace.count(max(0, most)) if why_whole(self._model.config, span) is None else 0

    def _draft(self, inputs: dict[str, Any], count: int) -> list[int]:
        """Up to ``count`` tokens that retrieval expects behind the step's; the cache is as before.

        The caller's random numbers are as before, too.
        """
        layers, token = self._cache.retrieval_layers, inputs["input_ids"]
        text, drafts, before = token, [], self._cache.input_ids
        if before is not None:
            # Ids that the cache never saw are left out.
            text = torch.cat([before[before >= 0][None].to(token), token], dim=1)
        devices = [token.device] if token.is_cuda else []
        for layer in layers:
            layer.begin_drafts()
        with torch.random.fork_rng(devices):
            for index in range(count):
                output = self._draft_step(**_at(inputs, token, index, logits=1))
                token, scores = self._guess(text, output.logits[:, -1].to(text.device))
                text = torch.cat([text, token], dim=1)
                drafts.append(token)
                if self._confidence and scores.softmax(-1).gather(1, token) < self._confidence:
                    break
        for layer in layers:
            assert layer.round is not None, "the drafts began one"
            layer.round.end_drafts()
        self._cache.drop_newest(-len(drafts))
        return [int(one) for one in torch.cat(drafts, dim=1)[0].tolist()]

    def _verify(self, inputs: dict[str, Any], tokens: list[int]) -> Any:
        """The model's output for all ``tokens``, which the cache holds from here on."""
        ids = inputs["input_ids"].new_tensor([tokens])
        output = self._model(**_at(inputs, ids, 0, logits=len(tokens)))
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        return output

    def _drop(self, start: int) -> None:
        """Have the cache as it was at ``start`` tokens, after a pass that broke off.

        Layers that can't go back become those of a snapshot before.
        """
        for layer in self._cache.retrieval_layers:
            layer.end_round(0)
        # A layer that broke off as it took tokens in can't go back; the cache says so when it is
        # used again, and what broke off is the error to raise here.
        with contextlib.suppress(RuntimeError):
            # At once: layers that record their past forget it when they go back.
            self._cache.drop_newest(min(0, start - self._cache.stack.held()))
        self._cache.snapshots.pinned = None
        stop_recording(self._cache.layers, but=self._recording)

    def _edits(self) -> int:
        return sum(layer.edits for layer in self._cache.retrieval_layers)


def why_not(model: PreTrainedModel, cache: RetrievalCache) -> str | None:
    """Why several tokens in one pass are not what one by one gives; None where they are."""
    if (why := why_whole(model.config)) is not None:
        return why
    for layer in foreign_layers_of(cache.layers).values():
        if isinstance(layer, LinearAttentionCacheLayerMixin) and not is_known(layer):
            return f"nobody knows how to copy the states of a {type(layer).__name__}"
    return None


class _Round:
    """Tokens that the exact pass read, its output, and how many of them the caller has read.

    Attributes:
        tokens: the step's, and the drafts behind it.
        inputs: of the step.
        is_inference: whether it ran in inference mode.
        used: how many the caller has read; at least one.
        edits: of the layers, when it had read them.
        draft_s, exact_s: seconds.
    """

    def __init__(
        self,
        tokens: list[int],
        inputs: dict[str, Any],
        output: Any,
        edits: int,
        draft_s: float,
        exact_s: float,
    ) -> None:
        self.tokens, self._output, self.edits = tokens, output, edits
        # A loop may count on in the same tensors.
        self.inputs = {x: one.clone() if torch.is_tensor(one) else one for x, one in inputs.items()}
        self.is_inference = torch.is_inference_mode_enabled()
        self.draft_s, self.exact_s = draft_s, exact_s
        self.used = 1

    def next(self, inputs: dict[str, Any]) -> Any:
        """The output for the caller's next ``inputs``; None where others were read ahead."""
        ids = inputs["input_ids"]
        if self.used == len(self.tokens) or self.tokens[self.used] != int(ids):
            return None
        if not _are_equal(inputs, _at(self.inputs, ids, self.used, logits=1)):
            return None
        self.used += 1
        return self.output(self.used - 1)

    def output(self, index: int) -> Any:
        """The model's output as if the token at ``index`` had come alone."""
        result = copy.copy(self._output)
        some = slice(index, index + 1)
        result["logits"] = self._output.logits[:, -len(self.tokens) :][:, some]
        if isinstance(result.get("hidden_states"), tuple):
            result["hidden_states"] = tuple(x[:, some] for x in result["hidden_states"])
        return result


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two steps have the same inputs: tensors by their numbers, no other containers."""

    def is_equal(first: Any, second: Any) -> bool:
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return torch.equal(first, second)
        return first is second or (isinstance(first, int | float | str) and first == second)

    return one.keys() == other.keys() and all(is_equal(one[name], other[name]) for name in one)


def _at(inputs: dict[str, Any], ids: torch.Tensor, ahead: int, logits: int) -> dict[str, Any]:
    """``inputs`` of a step as those of ``ids [1, n]``, ``ahead`` tokens later.

    ``logits``: of the newest tokens that are asked for, where ``inputs`` say how many.
    """
    count = ids.shape[1]
    changed: dict[str, Any] = {"input_ids": ids}
    for name in ("position_ids", "cache_position"):
        first = inputs.get(name)
        if first is not None:
            steps = torch.arange(ahead, ahead + count, device=first.device, dtype=first.dtype)
            changed[name] = first[..., -1:] + steps
    mask = inputs.get("attention_mask")
    if mask is not None:
        more = ahead + count - 1
        changed["attention_mask"] = torch.nn.functional.pad(mask, (0, more), value=1)
    for name in _TOKEN_TYPES:
        if inputs.get(name) is not None:
            changed[name] = inputs[name][:, -1:].expand(-1, count)
    if inputs.get("logits_to_keep") is not None:
        changed["logits_to_keep"] = logits
    return inputs | changed
