"""``hf-kvret tune``: what to pass to ``generate``, for a model and a text of one's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.lab.evaluate.caches import artifact_sha256
from hf_kvret.lab.evaluate.failures import attempt
from hf_kvret.lab.evaluate.measurement import Measurement, Row
from hf_kvret.lab.evaluate.reader import check_positions
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.evaluate.texts import describe_file, read_text, token_ids
from hf_kvret.lab.program import arguments, options as common
from hf_kvret.lab.program.arguments import DTYPES, check_device, names, several
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.results import Cell, Results, check_file
from hf_kvret.lab.tune import selection, variants as trials
from hf_kvret.lab.tune.selection import FULL
from hf_kvret.saved.folder import read_object


@dataclass(frozen=True, kw_only=True)
class Tune(Measurement):
    """Find the cheapest cache that agrees with full attention on your text.

    Contexts are read at several places of it; the tokens that follow there are forced through
    every variant, and the first choices for the next token are compared with those of full
    attention. After each window a variant is left out if it plainly misses --agreement, or is
    dearer than one that plainly reaches it. The result is the front (agreement against bytes
    and time) and one configuration for generate, as JSON.
    """

    command: ClassVar[str] = "tune"
    name: ClassVar[str] = ""
    summary: ClassVar[str] = "find the cheapest cache that agrees with full attention on your text"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret tune --model ./my-model --text my-text.txt --context 8K --agreement 0.99",
        "hf-kvret tune --model needle --context 2K --agreement 0.95 --out cache.json",
    )

    model: str = option(
        help="a folder, a hub id, or a model of ours: reference, reference-latent, needle"
    )
    text: Path | None = common.text_option(
        "contexts are cut from it; with --model needle none, it makes its own", required=False
    )
    context: int = option(8192, "tokens of a context, as 8192 or 8K", kind=arguments.length)
    agreement: float = option(
        0.99,
        "wanted share of tokens at which the first choice is full attention's",
        kind=arguments.number(0, 1),
    )
    methods: str = option(
        "flat,paris,lrqk,ctkvr",
        "to try, comma-separated, options after colons as paris:recent=64:store=host; your own "
        "cache as mine=module:factory",
    )
    top_k: tuple[int | float, ...] | None = option(
        None,
        "budgets to try, as 64,256 or 0.02,0.1; default: powers of two from 1/128 of the context "
        "to a half, and 3/4",
        kind=several(arguments.budget),
    )
    tokens: int = common.count_option(1024, "measured for a variant, over all windows")
    windows: int = common.count_option(8, "contexts, at different places of the text")
    out: Path | None = option(
        None, "write the chosen configuration as JSON", kind=arguments.file_path, metavar="FILE"
    )
    dtype: str = common.dtype_option()
    device: str = common.device_option()
    device_map: str | None = common.device_map_option()
    seed: int = common.seed_option()

    def __post_init__(self) -> None:
        if (self.text is None) != (self.model == "needle"):
            raise ValueError(
                "--model needle makes its own documents: leave --text out"
                if self.text
                else "give --text FILE, a text of the kind that the model will read"
            )

    @cached_property
    def subject(self) -> Subject:
        """The model, loaded when it is first asked for."""
        return load_subject(self.model, DTYPES[self.dtype], self.device, self.device_map)

    @cached_property
    def variants(self) -> dict[str, trials.Variant]:
        """The variants to try, by name.

        Raises:
            ValueError: see ``variants.check_method`` and ``variants.make_variants``.
        """
        methods = names(self.methods)
        if not methods:
            raise ValueError("--methods: none is named")
        for text in methods:
            trials.check_method(text, self.model)
        budgets = self.top_k or trials.ladder(self.context)
        if not budgets:
            raise ValueError(f"--context {self.context}: give a longer context, or --top-k")
        return trials.make_variants(methods, budgets, self.context)

    def check(self) -> None:
        """Whatever can be said without the model."""
        check_device(self.device)
        describe_file("--text", self.text)
        if self.out is not None:
            check_file("--out", self.out)
            is_new = not self.out.exists() or not self.out.stat().st_size
            if not is_new and not read_object(self.out, "cache_config")[0]:
                raise ValueError(f"--out {self.out} holds something else: give another file")
        _ = self.variants

    def setup(self) -> dict[str, Any]:
        keys = ("seed", "context", "tokens", "windows", "agreement", "methods", "top_k")
        settings = {key: getattr(self, key) for key in keys}
        place = {"device": self.device_map or self.device, "variants": len(self.variants)}
        text = {"text": describe_file("--text", self.text)}
        return self.subject.describe() | text | place | settings

    def cells(self) -> list[Cell]:
        """Every variant on every window; many are left out after the first ones."""
        return [
            {"cache": name, "window": window}
            for window in range(self.windows)
            for name in (FULL, *self.variants)
        ]

    def count(self, results: Results) -> int:
        """Cells to measure if no further variant is left out."""
        window, running = selection.standing(results, list(self.variants))
        cells = [
            {"cache": name, "window": number}
            for number in range(window, self.windows)
            for name in (FULL, *running)
        ]
        return sum(results.find(cell) is None for cell in cells)

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """Window by window, one by one; the choice is written at the end.

        ValueError where it would replace the results.
        """
        if self.out and results.path and self.out.resolve() == results.path.resolve():
            raise ValueError(f"--json and --out are both {self.out}: give each its own file")
        for base in {one.base.name: one.base for one in self.variants.values()}.values():
            base.check(self.subject.model)
        check_positions(self.subject.model, self.context + self._new)
        _ = self._walker
        window, running = selection.standing(results, list(self.variants))
        while window < self.windows:
            for name in (FULL, *running):
                cell = {"cache": name, "window": window}
                if results.find(cell) is None:
                    yield [cell]
                if name == FULL and not selection.complete(results, [FULL], window + 1):
                    # Full attention did not fit, and nothing can be compared with it.
                    return
            window, running = selection.standing(results, list(self.variants))
        if self.out is not None and selection.write_choice(self.out, results):
            tqdm.write(f"wrote {self.out}")

    def artifact_sha256(self, cache: str) -> str | None:
        if cache == FULL:
            return None
        return artifact_sha256(self.variants[cache].base, self.subject.model.config)

    def rows(self, group: Sequence[Cell]) -> list[Row]:
        """See ``Walker.row``; variants have their method and configuration too.

        The row of a cache that does not fit into memory says so.
        """
        rows = []
        for cell in group:
            row, why = attempt(partial(self._row, cell["cache"], cell["window"]))
            rows.append(why if row is None else row)
        return rows

    def _row(self, name: str, window: int) -> Row:
        if name == FULL:
            return self._walker.full(window)
        variant = self.variants[name]
        with variant.base.guard(self.subject.model):
            row = self._walker.row(variant, window)
        # JSON has no infinity, and the largest float is as good an option.
        largest, options = sys.float_info.max, variant.cache_config.items()
        config = {name: min(x, largest) if isinstance(x, float) else x for name, x in options}
        return row | {"method": variant.method, "cache_config": config}

    @property
    def _new(self) -> int:
        """Tokens of a window that are foretold."""
        return -(-self.tokens // self.windows)

    @cached_property
    def _walker(self) -> trials.Walker:
        return trials.Walker(self.subject, self._cut(), self._new)

    def _cut(self) -> list[torch.Tensor]:
        sizes = self.context, self._new, self.windows
        if self.text is None:
            return trials.needle_windows(*sizes, self.seed)
        tokenizer = self.subject.need_tokenizer("tune")
        ids, bos = token_ids(tokenizer, read_text(self.text)), tokenizer.bos_token_id
        ids = ids if bos is None else ids[1:]
        return trials.cut_windows(ids, *sizes, bos=bos, seed=self.seed)

    @classmethod
    def table(cls, results: Results) -> str:
        """The front and the choice."""
        return selection.tuning_text(results)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Agreement against bytes a step."""
        selection.draw_tuning(path, results)
