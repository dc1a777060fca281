"""Texts of a study that calibrates by itself: to learn from, contexts after it, and inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_kvret.calibration.sources import Corpus, cut, needle_documents, random_uuids, text_file
from hf_kvret.evaluation.contexts import describe_file
from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.evaluation.subject import Subject

_TASK = "a2ats-ablation"
# Of the calibration's text, for figures of quality.
_HELD_OUT = 0.1
# Consecutive tokens that two different texts rarely have in common, and the most they may.
_RUN = 32
_MOST_SHARED = 0.5
# Seeds of what is drawn, so that no two drafts are alike.
_CONTEXTS, _INPUTS = 1_000, 2_000


@dataclass(frozen=True)
class Texts:
    """Where tokens come from; those of the calibration never come again in a context.

    Attributes:
        text: for contexts; None for documents of needles, of other seeds than the calibration's.
        calibration: another file to learn from; None for the first ``tokens`` of ``text``, and
            contexts begin after them.
        tokens: to learn from; the last tenth only measures score errors.
        uuid_tokens: of random UUIDs that are learned from beside text.
        length: most tokens of a sequence to learn from.
        seed: of all that is drawn.

    Raises:
        FileNotFoundError, ValueError: no such file, or numbers and files that make no sense.
    """

    text: Path | None
    calibration: Path | None
    tokens: int
    uuid_tokens: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if self.calibration is None:
            return
        if self.text is None:
            raise ValueError(
                f"--calibration-text {self.calibration}: give --text too, the contexts to measure "
                "on come from it"
            )
        named = [
            describe_file(option, path)
            for option, path in (("--text", self.text), ("--calibration-text", self.calibration))
        ]
        if len({name.split()[-1] for name in named if name}) == 1:
            raise ValueError(
                f"--calibration-text {self.calibration} is the same text as --text: leave it out, "
                "and contexts begin after the tokens that are learned from"
            )

    def describe(self) -> dict[str, Any]:
        """The texts and numbers, for JSON."""
        text = describe_file("--text", self.text)
        other = describe_file("--calibration-text", self.calibration)
        return {
            "text": text or "documents of needles",
            "calibration_text": other or ("the start of --text" if text else "needle language"),
            "calibration_tokens": self.tokens,
            "uuid_tokens": self.uuid_tokens if text else 0,
            "calibration_length": self.length,
        }

    def corpus(self, subject: Subject) -> Corpus:
        """What is learned from, with its end held out.

        Raises:
            ValueError: too little text, or none and another language than that of needles.
        """
        told: dict[str, Any] = {"tokens": self.tokens, "length": self.length, "seed": self.seed}
        told["dtype"] = str(subject.model.dtype).removeprefix("torch.")
        uuids: list[torch.Tensor] = []
        path = self.calibration or self.text
        if path is None:
            self._check_needles(subject)
            sequences = list(needle_documents(self.tokens, self.length, self.seed))
            told["documents"] = "needle language"
        else:
            tokenizer = subject.need_tokenizer(_TASK)
            ids = text_file(path, tokenizer)
            sequences = cut(ids, self.length, self.tokens, "--calibration-tokens")
            told |= {"text": describe_file("--text", path), "uuid_tokens": self.uuid_tokens}
            if self.uuid_tokens:
                drawn = random_uuids(self.uuid_tokens, tokenizer, self.seed)
                uuids = cut(drawn, self.length, self.uuid_tokens, "--uuid-tokens")
        if len(sequences) < 2:
            raise ValueError(
                f"--calibration-tokens {self.tokens} in sequences of --calibration-length "
                f"{self.length}: at least two, one of them measures errors; take shorter ones"
            )
        held_out = max(1, round(_HELD_OUT * len(sequences)))
        told["held_out_sequences"] = held_out
        return Corpus([*uuids, *sequences], held_out, told)

    def contexts(self, subject: Subject, size: int, asking: int, count: int) -> list[torch.Tensor]:
        """At most ``count`` contexts ``[size]`` int64, none of whose tokens were learned from.

        Args:
            asking: tokens at the end of a context that are measured; of documents of needles these
                are questions and answers.

        Raises:
            ValueError: too little text, or the text of the calibration under another name.
        """
        if self.text is None:
            # Imported here, because the tasks import this module.
            from hf_kvret.evaluation.tasks.lrqk_factors import needle_tokens

            self._check_needles(subject)
            first = self.seed + _CONTEXTS
            return [needle_tokens(size, asking, seed) for seed in range(first, first + count)]
        ids = self._unseen(subject)
        found = min(count, len(ids) // size)
        if not found:
            raise ValueError(
                f"--text {self.text} has {len(ids)} tokens beside those of the calibration, fewer "
                f"than the {size} of a context: give shorter --lengths, fewer "
                "--calibration-tokens, or a longer text"
            )
        windows = list(ids[: found * size].view(found, size))
        if self.calibration is not None:
            self._check_apart(subject, windows)
        return windows

    def inputs(self, subject: Subject, count: int, size: int) -> dict[str, torch.Tensor]:
        """``count`` inputs ``[size]`` int64 by name, and one of UUIDs where the model reads text.

        Pieces of the text are as far from each other as it allows, and each begins with BOS.

        Raises:
            ValueError: too little text.
        """
        if self.text is None:
            self._check_needles(subject)
            first = self.seed + _INPUTS
            return {
                f"needles {number + 1}": next(needle_documents(size, size, first + number))
                for number in range(count)
            }
        ids, tokenizer = self._unseen(subject), subject.need_tokenizer(_TASK)
        if len(ids) < count * size:
            raise ValueError(
                f"--inputs {count} of --input-tokens {size}: --text has {len(ids)} tokens beside "
                "those of the calibration; take fewer or shorter ones, or a longer text"
            )
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        bos, step = torch.tensor(start, dtype=torch.int64), len(ids) // count
        found = {}
        for number in range(count):
            piece = ids[number * step + len(bos) :][: size - len(bos)]
            found[f"text {number + 1}"] = torch.cat([bos, piece])
        found["UUIDs"] = random_uuids(size, tokenizer, self.seed + _INPUTS)[:size]
        return found

    def _unseen(self, subject: Subject) -> torch.Tensor:
        """The tokens of ``text`` without those that are learned from, BOS in front."""
        assert self.text is not None
        tokenizer = subject.need_tokenizer(_TASK)
        ids = text_file(self.text, tokenizer)
        if self.calibration is not None:
            return ids
        bos = 0 if tokenizer.bos_token_id is None else 1
        return torch.cat([ids[:bos], ids[self.tokens :]])

    def _check_apart(self, subject: Subject, windows: list[torch.Tensor]) -> None:
        """ValueError where contexts repeat what is learned from, whatever the files are called."""
        known = set(_runs(torch.cat(self.corpus(subject).sequences)))
        for window in windows:
            runs = _runs(window)
            shared = sum(run in known for run in runs) / max(1, len(runs))
            if shared > _MOST_SHARED:
                raise ValueError(
                    f"--text {self.text}: {shared:.0%} of a context stands in --calibration-text "
                    f"{self.calibration} word for word; give a text that was not learned from"
                )

    def _check_needles(self, subject: Subject) -> None:
        language, known = NeedleLanguage(), subject.model.config.vocab_size
        if known != language.vocab_size:
            raise ValueError(
                f"--model {subject.name} has {known} token ids, the language of needles "
                f"{language.vocab_size}: give --text FILE, or take --model needle"
            )


def _runs(ids: torch.Tensor) -> list[bytes]:
    """All runs of consecutive tokens, to be compared."""
    plain = ids.contiguous().numpy().tobytes()
    width = ids.element_size()
    return [plain[width * start : width * (start + _RUN)] for start in range(len(ids) - _RUN + 1)]
