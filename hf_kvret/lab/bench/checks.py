"""Before anything is timed: does a cache give the answers that full attention gives?

Time measured on wrong answers is worth nothing, so a cache that fails is not measured at all.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.filling import LayerRows, fill_randomly, random_tokens, serving
from hf_kvret.lab.bench.opponents import attention_of
from hf_kvret.lab.bench.stepping import make_steps
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.reader import feed

LONGEST_CHECK = 1024
# The third step of a replayed cache is captured, so that three replays follow it.
_STEPS = 6
_MOST_ROWS = 2
# Least and largest relative error that is allowed, by dtype. Between them the measured rounding
# decides: four times the distance of two implementations of full attention. The least is some
# hundred roundings in fp32 and a few in half precision. The largest is twice the rounding of 32
# layers and more; leaving an eighth of the tokens out changes logits of such a depth by a third.
_LIMITS = {
    torch.float32: (1e-5, 1e-3),
    torch.bfloat16: (2**-7, 2**-3),
    torch.float16: (2**-10, 2**-5),
}
_TIMES_ROUNDING = 4.0
_FULL = CacheChoice("full", lambda config, capacity: DynamicCache(config=config))


class Checker:
    """Compares caches with full attention on one model.

    Args:
        model: with transformers' own attention, sdpa.
        rows: what random rows look like, ``measure_rows(model)``; None when they are not used.
        seed: of tokens and rows.
    """

    def __init__(self, model: PreTrainedModel, rows: list[LayerRows] | None, seed: int) -> None:
        self.model, self.rows, self.seed = model, rows, seed
        self._references: dict[tuple[int, int, str], tuple[torch.Tensor, float]] = {}
        self._passed: dict[tuple[str, int, int, str], str] = {}

    def check(self, choice: CacheChoice, context: int, batch: int, fill: str) -> str:
        """The result in a few words for the row.

        Logits of ``choice`` and of ``DynamicCache`` are compared after the prompt and after six
        steps, at ``min(context, 1024)`` tokens and at most two sequences. A retrieval cache has a
        budget that covers everything and rows of 16 bits, so that its logits must equal those of
        full attention. With ``fill="random"`` the steps are compared again behind random rows. A
        cache that has passed at a size is not checked again there.

        Raises:
            CheckFailed: logits are not finite, or further apart than rounding explains.
        """
        batch, context = min(batch, _MOST_ROWS), min(context, LONGEST_CHECK)
        key = choice.name, context, batch, fill
        if key not in self._passed:
            with choice.guard(self.model):
                self._passed[key] = self._check(choice, context, batch, fill)
        return self._passed[key]

    def _check(self, choice: CacheChoice, context: int, batch: int, fill: str) -> str:
        errors = []
        for source in ("prefill", "random") if fill == "random" else ("prefill",):
            size = context, batch, source
            logits = self._logits(choice, *size)
            if not choice.is_exact:
                continue
            expected, limit = self._reference(*size)
            errors.append(_distance(logits, expected))
            if errors[-1] > limit:
                raise CheckFailed(
                    f"{choice.name}: logits differ from full attention by {errors[-1]:.2e} of "
                    f"their size, and at most {limit:.2e} is rounding {self._where(*size)}"
                )
        if not errors:
            return "finite; not exact by design"
        return f"equal within {max(errors):.1e}"

    def _reference(self, context: int, batch: int, source: str) -> tuple[torch.Tensor, float]:
        """Logits of full attention, and the distance from them that rounding explains."""
        key = context, batch, source
        if key not in self._references:
            expected = self._logits(_FULL, *key)
            with attention_of(self.model, "eager"):
                rounding = _distance(self._logits(_FULL, *key), expected)
            least, largest = _LIMITS[self.model.dtype]
            limit = min(largest, max(least, _TIMES_ROUNDING * rounding))
            self._references[key] = expected, limit
        return self._references[key]

    @torch.inference_mode()
    def _logits(self, choice: CacheChoice, context: int, batch: int, source: str) -> torch.Tensor:
        """Logits ``[passes, B, V]`` fp32: after the prompt (if it is read) and after each step."""
        tokens = random_tokens(self.model, batch, context, self.seed)
        start = context - _STEPS
        prompt, passes = ExitStack(), []
        opened = prompt.enter_context(choice.open(self.model, context))
        cache = covering(opened, self.model, start)
        with prompt, serving(self.model, cache):
            if source == "prefill":
                passes.append(feed(self.model, cache, tokens[:, :start], 0))
                prompt.close()
            else:
                assert self.rows is not None
                size = batch, start, self.seed
                on = {"device": self.model.device, "dtype": self.model.dtype}
                fill_randomly(self.model.config, cache, self.rows, *size, **on)
            steps = make_steps(choice, self.model, cache, start)
            for token in tokens[:, start:].split(1, dim=1):
                # A later step may use the same memory.
                passes.append(steps.take(token)[0].clone())
                steps.finish()
        result = torch.stack([logits[:, -1].float() for logits in passes])
        if not bool(result.isfinite().all()):
            where = self._where(context, batch, source)
            raise CheckFailed(f"{choice.name}: logits are not finite {where}")
        # Only drafts of a lossless cache retrieve.
        options = cache.options if isinstance(cache, RetrievalCache) else None
        retrieves = options is not None and options.retrieves and not options.lossless
        layers = cache.stats()["layers"] if retrieves else []
        idle = [str(layer["layer"]) for layer in layers if not layer["selected"]]
        if idle:
            raise CheckFailed(
                f"{choice.name}: layers {', '.join(idle)} retrieved nothing though their budget "
                "covers everything; nothing was measured"
            )
        return result

    def _where(self, context: int, batch: int, source: str) -> str:
        """The size of a check, as the end of a message."""
        size = f"{context} tokens, batch {batch}, {source}, {self.model.dtype}"
        return f"({size}); nothing was measured"


def covering(cache: Cache, model: PreTrainedModel, length: int) -> Cache:
    """An empty retrieval cache like ``cache`` that should be exact; other caches stay themselves.

    Its budget covers everything, and its rows are not coded. Its window is small enough that most
    of ``length`` tokens are cold, so they are retrieved.
    """
    if not isinstance(cache, RetrievalCache) or not cache.options.retrieves:
        return cache
    options = cache.options
    most = max(1, length // 8)
    changed = options.exact().replace(
        dense_below=0,
        sink=min(options.sink, most),
        recent=min(options.recent, most),
        flush=min(options.flush, most),
    )
    return type(cache)(model.config, changed)


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, over that of ``expected``; the worst pass counts."""
    difference = (logits - expected).square().mean(dim=(1, 2)).sqrt()
    return float((difference / expected.square().mean(dim=(1, 2)).sqrt()).max())
