"""The table of types: what the scan says and what trials showed, in Markdown, text and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers

from hf_kvret.lab.coverage.record import Record
from hf_kvret.lab.coverage.scan import ModelType
from hf_kvret.lab.coverage.trial import Trial
from hf_kvret.registry import registered_methods
from hf_kvret.saved.identity import printable

BEGIN = "<!-- made by `hf-kvret models --md`, from here -->"
END = "<!-- made by `hf-kvret models --md`, to here -->"

_BF16_BYTES = 2
# How a refusal ends: with what to do instead.
_WAY_OUT = re.compile(r"[;:,]? (use|load|not supported yet|so a retrieval cache would)\b.*")
_OTHER_LAYERS = {"sliding": "slide", "recurrent": "are recurrent", "other": "hold nothing"}


@dataclass(frozen=True)
class Row:
    """A type, and its trial where there was one; ``stale`` as ``Setup.stale``."""

    type: ModelType
    trial: Trial | None
    stale: bool = False

    @property
    def verdict(self) -> str:
        """The verdict on the type; from the best to the worst:

        ``all modes``: in the conformance suite, and its trial was equal. ``tried``: its trial was
        equal. ``text part``: the trial of its text part was. ``not tried``: nothing is known
        against it. ``wrong``: its trial failed, although it is not refused. ``refused``.
        ``no default``: transformers itself has no default configuration.
        """
        if self.type.untold:
            return "no default"
        if self.type.refusal:
            return "refused"
        if self.trial is None or self.trial.outcome == "not tried":
            return "not tried"
        if self.trial.outcome != "equal":
            return "wrong"
        if self.trial.part != "whole":
            return "text part"
        return "all modes" if self.type.conformance else "tried"

    @property
    def reason(self) -> str:
        """Why it is not served, without its name and without what to do instead; else empty."""
        if self.type.untold:
            return f"transformers can't make a default configuration: {self.type.untold}"
        first, _, rest = self.type.refusal.partition(" ")
        rest = rest if not first.endswith(":") else f"is composite: {rest}"
        return _WAY_OUT.sub("", rest)

    @property
    def layers(self) -> str:
        """``12 of 48, others slide``; empty where it is refused."""
        counts = self.type.layers or {}
        total, full = sum(counts.values()), counts.get("full", 0)
        if total == full:
            return "all" if total else ""
        others = " or ".join(text for name, text in _OTHER_LAYERS.items() if name in counts)
        return f"{full} of {total}, others {others}"

    @property
    def rows(self) -> str:
        """KV heads, elements of a key and of a value: ``8 x (128 + 128)``; empty if unknown."""
        dims = self._dims
        return f"{self.type.kv_heads} x ({' + '.join(map(str, dims))})" if dims else ""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in the layers that retrieve, bf16; 0 if unknown."""
        full = (self.type.layers or {}).get("full", 0)
        return full * self.type.kv_heads * sum(self._dims) * _BF16_BYTES

    @property
    def without(self) -> list[str]:
        """Methods that don't serve it, by its trial."""
        tried = {} if self.trial is None else self.trial.methods
        of_latents = self.type.served and self.type.latent
        return [
            name
            for name, cls in registered_methods().items()
            if tried.get(name, "equal") != "equal" and (cls.Config.retrieves or of_latents)
        ]

    @property
    def _dims(self) -> tuple[int, ...]:
        """Elements of a key, by the configuration, and of a value, by the trial; else empty."""
        if self.trial is None or len(self.trial.rows) != 1:
            return ()
        _, key, value = self.trial.rows[0]
        if self.type.latent:
            # Latents stand where keys do, and their rotated keys where values do.
            return (key, value) if key + value == self.type.key_dim else (self.type.key_dim,)
        if key == self.type.key_dim:
            return key, value
        return (self.type.key_dim, self.type.key_dim) if key == value else ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "type": self.type.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "rows": self.rows,
            "bytes_a_token": self.token_bytes,
            "without": self.without,
            "default": asdict(self.type),
            "stale": self.stale,
            "trial": None if self.trial is None else asdict(self.trial),
        }


def make_rows(types: Iterable[ModelType], record: Record) -> list[Row]:
    """Types with their trials of ``record``; those that are refused have none."""
    return [
        Row(one, record.trials[one.name], record.setups[one.name].stale)
        if one.served and one.name in record.trials
        else Row(one, None)
        for one in types
    ]


def stale_note(rows: Iterable[Row], record: Record) -> str:
    """How many trials are stale, what they were made with, and what to do; empty for none."""
    names = [row.type.name for row in rows if row.stale]
    if not names:
        return ""
    count = f"{len(names)} types were" if len(names) > 1 else f"{names[0]} was"
    return (
        f"{count} tried with another state of the code or of transformers: with "
        f"{record.versions(names)}. `hf-kvret models --try FILE` tries again."
    )


def markdown(rows: Iterable[Row], record: Record) -> str:
    """Two tables: what is served, and what is refused, with all types of one reason in a line."""
    rows = list(rows)
    served = [row for row in rows if row.type.served]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.type.served:
            reasons.setdefault(row.reason, []).append(f"`{row.type.name}`")
    note = stale_note(rows, record)
    counts = {row.verdict: sum(other.verdict == row.verdict for other in rows) for row in rows}
    summary = ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
    lines = [
        f"{len(rows)} types of transformers {transformers.__version__}: {summary}.",
        *(["", note] if note else []),
        "",
        "| type | tested | layers that retrieve | rows of a layer | bytes a token | graph | "
        "auto chunks |",
        "|---|---|---|---|---|---|---|",
        *map(_served_line, served),
        "",
        "### Refused",
        "",
        "With a `ValueError` that says why and what to do instead, before the first token.",
        "",
        "| because it | types |",
        "|---|---|",
        *(f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())),
    ]
    return "\n".join(lines)


def _served_line(row: Row) -> str:
    changed = f", {row.type.changed}" if row.type.changed else ""
    without = f", not in {', '.join(row.without)}" if row.without else ""
    cells = (
        f"`{row.type.name}`{changed}",
        row.verdict + without,
        row.layers,
        row.rows,
        f"{row.token_bytes:,}" if row.token_bytes else "",
        "yes" if row.type.replay else "no",
        "yes" if row.type.chunks else "no",
    )
    return f"| {' | '.join(cells)} |"


def write_page(path: Path, text: str) -> None:
    """Put ``text`` between the marks of a page; the rest of it stays.

    Raises:
        ValueError: the page has no marks; the message says which lines they are.
    """
    page = path.read_text(encoding="utf-8")
    head, begin, body = page.partition(BEGIN)
    _, end, tail = body.partition(END)
    if not begin or not end:
        raise ValueError(
            f"{path} has no place for the table: write these two lines where it shall be: "
            f"{BEGIN} {END}"
        )
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


def lines(rows: Iterable[Row], width: int) -> list[str]:
    """A header, and a line of at most ``width`` characters for every type; KiB are of a token."""
    rows = list(rows)
    name_width = max((len(row.type.name) for row in rows), default=0)
    header = _in_columns(("layers", "rows", "KiB", "graph", "not in"))
    table = [("type", "tested", header)]
    table += [(row.type.name, row.verdict, _short(row)) for row in rows]
    starts = (f"{name:<{name_width}}  {verdict:<10}  " for name, verdict, _ in table)
    return [
        (start + _cut(text, max(20, width - len(start)))).rstrip()
        for start, (_, _, text) in zip(starts, table, strict=True)
    ]


def _short(row: Row) -> str:
    """``12/48  8x(128+128)  192  yes`` and more, or why it is refused."""
    if not row.type.served:
        return row.reason
    counts = row.type.layers or {}
    return _in_columns(
        (
            f"{counts.get('full', 0)}/{sum(counts.values())}",
            row.rows.replace(" ", ""),
            f"{row.token_bytes / 1024:,.0f}" if row.token_bytes else "",
            "yes" if row.type.replay else "",
            ", ".join(row.without),
        )
    )


def _in_columns(cells: tuple[str, str, str, str, str]) -> str:
    layers, state, size, graph, without = cells
    return f"{layers:<7} {state:<13} {size:>5} {graph:<5} {without}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 4].rstrip()} ..."


def details(row: Row, record: Record) -> str:
    """Everything known of one type, a line each."""
    one, tried = row.type, row.trial
    facts = {"type": one.name, "text part": one.text_type, "verdict": row.verdict}
    if not one.served:
        facts["because"] = one.refusal or row.reason
        if one.conformance:
            facts["but"] = "the conformance suite has it with other settings: see docs/models.md"
    else:
        facts |= {
            "layers that retrieve": row.layers,
            "key and value heads": str(one.kv_heads),
            "numbers of a key": f"{one.key_dim}" + (" (latent and rope)" if one.latent else ""),
            "rows of a layer": row.rows,
            "bytes a token": f"{row.token_bytes:,} in bf16" if row.token_bytes else "",
            "CUDA graph": "replayed" if one.replay else "steps are not replayed",
            "prompt": "may be cut by prefill_chunk='auto'" if one.chunks else "never cut by 'auto'",
            "not in": ", ".join(row.without),
            "conformance": "in all modes" if one.conformance else "not in the suite",
        }
        if tried is not None:
            made_with = record.versions([one.name])
            facts["trial of the default"] = f"{tried.outcome}, {tried.part}"
            facts["tried with"] = made_with + (", not the present ones" if row.stale else "")
            facts["trial says"] = tried.detail
            facts |= {f"  {name}": result for name, result in tried.methods.items()}
    width = max(map(len, facts))
    lines = (f"{name:<{width}}  {value}" for name, value in facts.items() if value)
    return "\n".join(map(printable, lines))
