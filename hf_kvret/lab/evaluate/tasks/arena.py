"""Any cache beside full attention: the bytes that it holds, and what its answers lose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
import transformers

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.needles import Document, Wording, choose_wording, contains
from hf_kvret.lab.evaluate.reader import Reader, begin, check_positions, divergence
from hf_kvret.lab.evaluate.tasks.agreement import Agreement, in_turn
from hf_kvret.lab.evaluate.usage import Held, attention_keys, held_blocks, held_bytes, step_bytes
from hf_kvret.lab.program.arguments import percent, several, whole_number
from hf_kvret.lab.program.options import answer_tokens_option, option, with_default
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import plot_front
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, or_dash, table_of
from hf_kvret.testing.modes import MODES, Mode, reset
from hf_kvret.testing.scenario import Outcome, Scenario, describe

# Steps behind the forced ones: two for bytes, one for keys.
_EXTRA = 3
_MODE_CAPACITY = 256


def _second_request(s: Scenario) -> None:
    """Another cache reads another text when one has answered."""
    for request in range(2):
        cache = s.cache()
        s.forward(s.prompt(1, 60, salt=request), cache, None)
        s.feed(s.prompt(1, 6, salt=2 + request), cache, f"request {request}")


_MODES = {
    "second request": Mode("second_request", _second_request, direct=True),
    # These are of the conformance suite.
    "padded batch": MODES["loop"],
    "crop": MODES["crop_deep"],
    "reset": MODES["reset"],
}
# Lossless takes one sequence.
_RESET_ALONE = Mode("reset_alone", partial(reset, lengths=((60,), (52,))), direct=False)


@dataclass(frozen=True, kw_only=True)
class Arena(Agreement):
    """Any caches beside full attention, in one table that is sorted by the bytes they hold.

    Full attention goes on greedily from each context, and its tokens are forced through the
    cache, whose steps take turns with its own. Bytes are those of all storages that a cache
    keeps alive, over those of transformers' DynamicCache at the same token. A needle is asked
    for at each of --depths of the text. Then modes of the conformance suite are played.
    """

    name: ClassVar[str] = "arena"
    summary: ClassVar[str] = "bytes that any cache holds, and what its answers lose"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval arena --model smollm2 --text wiki.test.raw --context 4K --caches "
        "paris:top_k=0.06,aqua:predictor=none:bits=4,quantized,mine=./mine.py:make",
    )

    windows: int = with_default(Agreement, "windows", 1)
    new_tokens: int = option(64, "of each continuation, after its first one", kind=whole_number(2))
    depths: tuple[float, ...] = option(
        (10.0, 50.0, 90.0), "of needles, in percent of the text", kind=several(percent)
    )
    answer_tokens: int = answer_tokens_option()

    def check_length(self, length: int) -> None:
        super().check_length(length)
        check_positions(self.subject.model, length + self.new_tokens + _EXTRA)
        self._document(length, 0.0)

    def details(self) -> dict[str, Any]:
        return super().details() | {"depths": list(self.depths)}

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        length = cell["length"]
        bar = partial(tqdm, leave=False, desc=choice.name)
        contexts = bar(self.contexts(length), unit="context")
        forced, kls = [self._forced(choice, context) for context in contexts], list[float]()
        for one in forced:
            kls += one.pop("kls")
        depths = bar(self.depths, unit="needle")
        return {
            # Bytes are those of the last context.
            **forced[-1],
            "tokens": len(kls),
            "forced_equal": fmean(one["forced_equal"] for one in forced),
            "kl_mean": fmean(kls),
            "kl_max": float(np.max(kls)),
            "step_over_full": fmean(one["step_over_full"] for one in forced),
            "needles": [self._needle(choice, length, depth) for depth in depths],
            "modes": {name: self._mode(choice, name) for name in bar(_MODES, unit="mode")},
            "transformers": transformers.__version__,
        }

    def _forced(self, choice: CacheChoice, context: torch.Tensor) -> dict[str, Any]:
        """Bytes, agreement and time of the steps behind a context."""
        full, logits = self.full(context)
        full, model = full.fork(), self.subject.model
        reader = Reader(model, choice, len(context) + self.new_tokens + _EXTRA)
        reader.prefill(context)
        reader.need_logits()
        held = [_held(full, reader)]
        with reader.rounds():
            begun = in_turn(full, reader, logits, 1)
            held.append(_held(full, reader))
            # The first step makes what the prompt has left over, and is not timed.
            full.seconds = reader.seconds = 0.0
            later = in_turn(full, reader, begun[0], self.new_tokens - 1)
        held.append(_held(full, reader))
        exact, given = (torch.cat(pair) for pair in zip(begun, later, strict=True))
        times, usage = reader.seconds / full.seconds, reader.usage()
        token = exact[-1:].argmax(-1)
        peak, made = step_bytes(lambda: reader.feed(token))
        with attention_keys(model) as keys:
            reader.feed(token)
        blocks = held_blocks(reader.cache, model)
        whole = [key for key in keys if key.shape[-2] > len(context) / 2]
        says = getattr(reader.cache, "reported_bytes", None)
        reported = says() if callable(says) else says
        return {
            "held_bytes": [own.device + own.host for _, own in held],
            "held_full_bytes": [other.device + other.host for other, _ in held],
            "mapped_bytes": held[-1][1].mapped,
            "reported_bytes": None if reported is None else int(reported),
            "read_ratio": usage.read_ratio,
            "step_bytes": usage.step_bytes,
            "peak_bytes": peak,
            "made_bytes": made,
            "unpacked": sum(key.untyped_storage().data_ptr() not in blocks for key in whole),
            "kls": divergence(exact, given).tolist(),
            "forced_equal": float((exact.argmax(-1) == given.argmax(-1)).float().mean()),
            "step_over_full": times,
        }

    def _needle(self, choice: CacheChoice, length: int, depth: float) -> bool:
        """Whether a needle is found, with the question read with the text."""
        document, wording = self._document(length, depth), self._wording
        fact, model = document.facts[0], self.subject.model
        question, count = torch.tensor(fact.question), wording.answer_len
        reader, logits = begin(model, choice, document.context, question, count, whole=True)

        def is_right(given: list[int]) -> bool:
            return contains(fact.answer, wording.text(given))

        return is_right(reader.answer(logits, count, wording.stop, done=is_right))

    @cached_property
    def _wording(self) -> Wording:
        return choose_wording(self.subject, self.name, self.text, self.answer_tokens)

    def _document(self, length: int, depth: float) -> Document:
        rng = np.random.default_rng([self.seed, length, round(1000 * depth)])
        return self._wording.document(rng, length, [depth], 1)

    def _mode(self, choice: CacheChoice, name: str) -> float | str:
        """The largest KL(full || cache) of a mode of use, or why there is none."""
        alone = name == "reset" and choice.options is not None and choice.options.lossless
        mode, model = _RESET_ALONE if alone else _MODES[name], self.subject.model
        reference = self._references[mode]
        if isinstance(reference, str):
            return reference
        try:
            with ExitStack() as stack:
                opened = partial(choice.open, model, _MODE_CAPACITY)
                outcome = mode.run(model, lambda: stack.enter_context(opened()))
        except Exception as error:
            return f"raises {describe(error)}"
        # Where generate took another token, what follows is another text.
        pairs = (
            (logits[:, :1].flatten(0, 1), outcome.values[label][:, :1].flatten(0, 1))
            for label, logits in reference.values.items()
            if logits.is_floating_point()
        )
        return float(torch.cat([divergence(*pair) for pair in pairs]).max())

    def check_cells(self, cells: Sequence[Cell]) -> None:
        super().check_cells(cells)
        # Full attention is asked before a cache may change the model.
        self._references.keys()

    @cached_property
    def _references(self) -> dict[Mode, Outcome | str]:
        modes, model = {*_MODES.values(), _RESET_ALONE}, self.subject.model
        return {mode: mode.reference(model) for mode in modes}

    @classmethod
    def table(cls, results: Results) -> str:
        rows = sorted(results, key=lambda pair: _over_full(pair[1], -1))
        columns: Columns = {
            "cache": lambda cell, row: cell["cache"],
            "context": lambda cell, row: str(cell["length"]),
            "held / full": lambda cell, row: f"{_over_full(row, -1):.2f}",
            "behind the prompt": lambda cell, row: f"{_over_full(row, 0):.2f}",
            "a token later": lambda cell, row: f"{_over_full(row, 1):.2f}",
            "by its own report": lambda cell, row: _share(row, "reported_bytes"),
            "in mapped files": lambda cell, row: _share(row, "mapped_bytes"),
            "cold rows read": lambda cell, row: or_dash(row["read_ratio"], ".0%"),
            "peak of a step / full": lambda cell, row: _share(row, "peak_bytes"),
            "unpacks keys": lambda cell, row: "yes" if row["unpacked"] else "no",
            "tokens equal": lambda cell, row: f"{row['forced_equal']:.1%}",
            "KL, mean": lambda cell, row: or_dash(row["kl_mean"], ".1e"),
            "needles": lambda cell, row: f"{sum(row['needles'])} of {len(row['needles'])}",
            "step / full": lambda cell, row: f"{row['step_over_full']:.2f}",
        }
        if not any(row["mapped_bytes"] for _, row in rows):
            columns = {name: columns[name] for name in columns if name != "in mapped files"}
        uses: Columns = {
            **{name: columns[name] for name in ("cache", "context")},
            **{name: partial(_played, name) for name in _MODES},
            "transformers": lambda cell, row: row["transformers"],
        }
        return f"{table_of(rows, columns, 2)}\n\n{table_of(rows, uses, 2)}"

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        points = {
            f"{cell['cache']}, {cell['length']}": (_over_full(row, -1), max(row["kl_mean"], 1e-9))
            for cell, row in results
            if row["kl_mean"] is not None
        }
        x, y = "bytes held / DynamicCache's", "KL(full || cache), nats"
        plot_front(path, points, title=f"{results.setup['model']}: bytes and loss", x=x, y=y)


def _held(*readers: Reader) -> tuple[Held, ...]:
    return tuple(held_bytes(one.cache, one.model) for one in readers)


def _over_full(row: dict[str, Any], index: int) -> float:
    """Bytes held over DynamicCache's: behind the prompt, a token later, at the end."""
    return row["held_bytes"][index] / row["held_full_bytes"][index]


def _share(row: dict[str, Any], name: str) -> str:
    """A number of bytes over those that DynamicCache holds at the end."""
    return "-" if row[name] is None else f"{row[name] / row['held_full_bytes'][-1]:.2f}"


def _played(name: str, cell: Cell, row: dict[str, Any]) -> str:
    """A mode in few words: as full attention, with a divergence, or the name of an error."""
    result = row["modes"][name]
    if result is None or isinstance(result, str):
        return (result or "KL nan").partition(":")[0]
    return "exact" if result < 1e-6 else f"KL {result:.1e}"
