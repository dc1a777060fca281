"""Studies that calibrate by themselves: texts to learn from and to measure on, kept apart."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from ablation import Ablation, check_needles, needle_tokens
from tqdm import tqdm

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.sources import cut, needle_documents, text_file
from hf_kvret.lab.calibrate.study import Calibration
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Choices
from hf_kvret.lab.evaluate.texts import describe_file
from hf_kvret.lab.program.arguments import file_path, length
from hf_kvret.lab.program.common_options import text_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.results import Cell

# This share of the calibration's text is held out for figures of quality.
_HELD_OUT = 0.1
# Small models have few KV heads, so one pass of a text serves so many layers.
_LAYERS_AT_ONCE = 8
# Contexts have other seeds than the calibration.
_CONTEXTS = 1_000


@dataclass(frozen=True, kw_only=True)
class CalibratedAblation(Ablation):
    """Makes the artifacts that it needs; tokens of the calibration never come in a context.

    Without ``calibration_text`` the first ``calibration_tokens`` of ``text`` are learned from, and
    contexts begin after them. Documents of needles have other seeds than the calibration's.
    """

    instead = "; --artifacts names the artifacts' folder"
    artifacts: Path | None = option(
        None,
        "keep the artifacts here, or find them; default: they are gone in the end",
        kind=file_path,
        metavar="DIR",
    )
    calibration_text: Path | None = text_option(
        "learn from this; default: the start of --text, contexts begin after it", required=False
    )
    calibration_tokens: int = option(32_768, "the last tenth is held out", kind=length)
    calibration_length: int = option(4096, "most tokens of a sequence", kind=length)

    def __post_init__(self) -> None:
        if self.calibration_text is not None and self.text is None:
            raise ValueError(
                f"--calibration-text {self.calibration_text}: give --text too, the contexts to "
                "measure on come from it"
            )
        if self.text is not None and self.calibration_text == self.text:
            raise ValueError(
                f"--calibration-text {self.text} is --text, too: leave it out, and contexts begin "
                "after the tokens that are learned from"
            )
        if self.artifacts is not None and ":" in str(self.artifacts.absolute()):
            raise ValueError(
                f"--artifacts {self.artifacts}: a colon in the path would end the option of a "
                "cache; give another folder"
            )

    @cached_property
    def _found(self) -> dict[str, CalibrationArtifact]:
        return {}

    @cached_property
    def _temporary(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="hf-kvret-artifacts-")

    def path(self, name: str) -> Path:
        """The folder of the artifact ``name``; one without ``artifacts`` is gone with this."""
        return (self.artifacts or Path(self._temporary.name)).absolute() / name

    def find(self, name: str, calibration: Calibration, subject: Subject) -> CalibrationArtifact:
        """The artifact ``name``, learned as ``calibration`` says where it is missing.

        What is there is used where it was made of the same model, text and options, and refused
        with a ValueError otherwise; an interrupted calibration goes on.
        """
        if name in self._found:
            return self._found[name]
        folder, corpus, model = self.path(name), self.corpus(subject), subject.model
        if (folder / DESCRIPTION).is_file():
            result = CalibrationArtifact.from_pretrained(folder, method=calibration.method)
            result.check(model.config)
            result.check_weights(model)
            previous = {**result.options, **result.data}
            changed = [
                f"{key} was {previous.get(key)!r}, now {value!r}"
                for key, value in (calibration.options() | corpus.description).items()
                if previous.get(key) != value
            ]
            if changed:
                raise ValueError(
                    f"{folder} holds an artifact of another calibration ({'; '.join(changed)}): "
                    "give another --artifacts, or delete that folder"
                )
        else:
            tqdm.write(f"calibrating: {name}, in {folder}", file=sys.stderr)
            result = calibrate(model, corpus, calibration, folder, layers_at_once=_LAYERS_AT_ONCE)
        self._found[name] = result
        return result

    def own_folder(self, subject: Subject) -> Path | None:
        """The finished artifact in the model's own folder, if there is one."""
        folder = Path(subject.model.config._name_or_path) / self.method
        return folder if (folder / DESCRIPTION).is_file() else None

    def folders(self) -> dict[str, Path]:
        return {} if self.artifacts is None else {"--artifacts": self.artifacts}

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        # Caches are not tried: their artifacts may not be there yet.
        self.check_contexts(cells, subject)

    def details(self) -> dict[str, Any]:
        other = describe_file("--calibration-text", self.calibration_text)
        usual = "the start of --text" if self.text else "needle language"
        return {**super().details(), "calibration_text": other or usual}

    def corpus(self, subject: Subject) -> Corpus:
        """What is learned from, with its end held out.

        Raises:
            ValueError: too little text, or none and another language than that of needles.
        """
        tokens, most = self.calibration_tokens, self.calibration_length
        description: dict[str, Any] = {"tokens": tokens, "length": most, "seed": self.seed}
        description["dtype"] = str(subject.model.dtype).removeprefix("torch.")
        path = self.calibration_text or self.text
        if path is None:
            check_needles(subject)
            sequences = list(needle_documents(tokens, most, self.seed))
            description["documents"] = "needle language"
        else:
            ids = text_file(path, subject.need_tokenizer(self.name))
            sequences = cut(ids, most, tokens, "--calibration-tokens")
            description["text"] = describe_file("--text", path)
        if len(sequences) < 2:
            raise ValueError(
                f"--calibration-tokens {tokens} in sequences of --calibration-length {most}: at "
                "least two, one of them measures errors; take shorter ones"
            )
        held_out = max(1, round(_HELD_OUT * len(sequences)))
        description["held_out_sequences"] = held_out
        return Corpus(sequences, held_out, description)

    def contexts(self, subject: Subject, part: str, length: int) -> list[torch.Tensor]:
        size, count = length + self.following(part), self.windows
        if self.text is None:
            check_needles(subject)
            asking, first = self.asking(part, length), self.seed + _CONTEXTS
            return [needle_tokens(size, asking, seed) for seed in range(first, first + count)]
        ids = self._unseen(subject)
        result = min(count, len(ids) // size)
        if not result:
            raise ValueError(
                f"--text {self.text} has {len(ids)} tokens beside those of the calibration, fewer "
                f"than the {size} of a context: give a shorter --context, fewer "
                "--calibration-tokens, or a longer text"
            )
        return list(ids[: result * size].view(result, size))

    def _unseen(self, subject: Subject) -> torch.Tensor:
        """The tokens of ``text`` without those that are learned from, BOS in front."""
        assert self.text is not None
        tokenizer = subject.need_tokenizer(self.name)
        ids = text_file(self.text, tokenizer)
        if self.calibration_text is not None:
            return ids
        bos = 0 if tokenizer.bos_token_id is None else 1
        return torch.cat([ids[:bos], ids[self.calibration_tokens :]])
