"""LongBench's data: a folder of .jsonl files, or the archive data.zip that the hub has."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from hf_kvret.calibration.hub_access import needs_cache


@dataclass(frozen=True)
class LongSample:
    """One question of LongBench.

    Attributes:
        context: the long text; in few-shot tasks, the examples.
        input: the question; empty where the task is the same for all.
        answers: the references.
        length: of the text in words, as the file says.
        classes: names to choose among; empty but for classification.
    """

    context: str
    input: str
    answers: tuple[str, ...]
    length: int
    classes: tuple[str, ...]


@dataclass(frozen=True)
class LongData:
    """Where the files are.

    Args:
        path: a folder with ``<task>.jsonl``, directly or in its folder ``data``, or a .zip with
            them; LongBench-E's files are called ``<task>_e.jsonl``.
        even: use LongBench-E's.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: a file that is no zip.
    """

    path: Path
    even: bool = False

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise FileNotFoundError(
                f"--data {self.path}: no such folder or file. Give LongBench's data.zip or the "
                "folder that it unpacks to"
            )
        if self.path.is_file() and not zipfile.is_zipfile(self.path):
            raise ValueError(f"--data {self.path}: neither a folder nor a .zip")

    def file_name(self, task: str) -> str:
        """The task's file, folders left out."""
        return f"{task}_e.jsonl" if self.even else f"{task}.jsonl"

    def find(self, task: str) -> bytes | None:
        """The content of a task's file, or None when there is none."""
        names = [prefix + self.file_name(task) for prefix in ("", "data/")]
        if self.path.is_dir():
            files = (self.path / name for name in names)
            return next((file.read_bytes() for file in files if file.is_file()), None)
        with zipfile.ZipFile(self.path) as archive:
            known = {*archive.namelist()}
            return next((archive.read(name) for name in names if name in known), None)

    def fingerprint(self, task: str) -> str | None:
        """File name and the start of its sha256; None when there is no file."""
        content = self.find(task)
        if content is None:
            return None
        return f"{self.file_name(task)} {sha256(content).hexdigest()[:12]}"

    def read(self, task: str, count: int | None = None) -> list[LongSample]:
        """The first ``count`` samples of a task, or all of them.

        Raises:
            FileNotFoundError: no file for the task.
            ValueError: a line that is not as LongBench writes it, by number; or no line at all.
        """
        content = self.find(task)
        name = self.file_name(task)
        if content is None:
            raise FileNotFoundError(
                f"--data {self.path} has no {name}: leave {task} out of --tasks, or add the file"
            )
        try:
            lines = content.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} in {self.path} is not UTF-8 text: {error}") from error
        numbered = [(place, line) for place, line in enumerate(lines, 1) if line.strip()][:count]
        if not numbered:
            raise ValueError(f"{name} in {self.path} has no samples in it")
        return [_sample(f"{name} in {self.path}, line {place}", line) for place, line in numbered]


def download(hub_id: str) -> Path:
    """The path of ``data.zip`` from a data set of the hub, or from the local copy of it.

    Raises:
        ValueError: the hub can't be reached and nothing was kept, or it has no such data set.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        cached = needs_cache("--hub-id", hub_id, "data.zip", "dataset")
        path = hf_hub_download(hub_id, "data.zip", repo_type="dataset", local_files_only=cached)
        return Path(path)
    # OSError is what being offline and every answer of the hub derive from.
    except (OSError, EntryNotFoundError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"--hub-id {hub_id}: data.zip can't be had ({reason}). Download it elsewhere and give "
            "--data PATH"
        ) from error


def _sample(where: str, line: str) -> LongSample:
    try:
        content = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: no JSON object")
    answers: Any = content.get("answers")
    classes: Any = content.get("all_classes") or []
    wrong = [
        field
        for field, fine in (
            ("context", isinstance(content.get("context"), str)),
            ("input", isinstance(content.get("input"), str)),
            ("answers", _are_strings(answers) and bool(answers)),
            ("all_classes", _are_strings(classes)),
            ("length", isinstance(content.get("length"), int)),
        )
        if not fine
    ]
    if wrong:
        raise ValueError(
            f"{where}: {', '.join(wrong)} missing or of another type. LongBench has context and "
            "input (strings), answers (list of strings), length (integer), all_classes (list of "
            "strings, or null)"
        )
    return LongSample(
        content["context"], content["input"], tuple(answers), content["length"], tuple(classes)
    )


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
