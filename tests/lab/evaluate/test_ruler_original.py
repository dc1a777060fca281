"""Samples are, letter for letter, those of RULER's own scripts.

The digests were made by running the scripts of NVIDIA/RULER at c3f5e3b on the files that ``texts``
writes, with :func:`words` for the tokenizer and :func:`split_simply` for NLTK's sentences.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.ruler import RulerData, generate

SAMPLES = 3
CHAT = "<|user|>\n{task_template}<|end|>\n<|assistant|>\n"
DIGESTS = {
    ("niah_single_1", 4096, 42, False): "ab1f913232f8a5e4",
    ("niah_single_2", 4096, 42, False): "c1b2d2ed7ce02192",
    ("niah_single_3", 4096, 42, False): "1935caf6a68bf2fe",
    ("niah_multikey_1", 4096, 42, False): "bb85f416ae21515c",
    ("niah_multikey_2", 4096, 42, False): "33d98709d30332ea",
    ("niah_multikey_3", 4096, 42, False): "3062169dfc9842f3",
    ("niah_multivalue", 4096, 42, False): "47dc3269c1345c90",
    ("niah_multiquery", 4096, 42, False): "e08ad260391d92b7",
    ("vt", 4096, 42, False): "3301bbf63a2264f4",
    ("cwe", 4096, 42, False): "6f98eeb1471629a5",
    ("fwe", 4096, 42, False): "51d5c084c77bd081",
    ("qa_1", 4096, 42, False): "5558cf72a394b3ec",
    ("qa_2", 4096, 42, False): "2462436f68b30b48",
    ("niah_single_1", 2048, 7, True): "6c1b938ef12bf201",
    ("niah_multikey_3", 2048, 7, True): "25b6163b63b66771",
    ("niah_multivalue", 2048, 7, True): "d2eacba1ac140449",
    ("vt", 2048, 7, True): "37d811d5bfa059d5",
    ("cwe", 2048, 7, True): "adbb6d19add9e1d9",
    ("fwe", 2048, 7, True): "9dcfcdeee2fcb915",
    ("qa_1", 2048, 7, True): "147852477a54d3c9",
}


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


def passage(start: int, sentences: int) -> str:
    """Sentences of words that are neither all the same nor in order."""
    return " ".join(
        f"Thing {i} has {i * i % 71} parts, and {'so' * (i % 3 + 1)} it {'is' if i % 2 else 'was'}."
        for i in range(start, start + sentences)
    )


def texts() -> dict[str, Any]:
    """Essays, SQuAD and HotpotQA in the formats of RULER's files."""
    articles = [
        {
            "paragraphs": [
                {
                    "context": passage(31 * a + 7 * p, 3 + (a + p) % 4),
                    "qas": [
                        {
                            "question": f"What of {a} and {p}, {q}? ",
                            "answers": [{"text": f"{a} {p} {q}"}, {"text": f"it is {a}"}],
                            "is_impossible": (a + p + q) % 3 == 0,
                        }
                        for q in range(2)
                    ],
                }
                for p in range(2 + a % 3)
            ]
        }
        for a in range(40)
    ]
    items = [
        {
            "question": f"Which of {i}?",
            "answer": f"number {i}",
            "context": [
                [f"Title {i + j}", [passage(i + 5 * j, 2), " " + passage(j, 1 + j % 3)]]
                for j in range(10)
            ],
        }
        for i in range(12)
    ]
    return {
        "essays": {"text": "\n" + passage(0, 120).replace(". Thing 5", ".\n\nThing  5") + "\n"},
        "squad": {"data": articles},
        "hotpot": items,
    }


def digest(rows: Iterable[tuple[str, str, Sequence[str], int]]) -> str:
    """Of input, answer prefix, references and length of each sample."""
    text = json.dumps([[text, prefix, list(right), n] for text, prefix, right, n in rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RulerData:
    folder: Path = tmp_path_factory.mktemp("original")
    for name, content in texts().items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return RulerData(**{name: folder / f"{name}.json" for name in texts()})


@pytest.mark.skipif(
    version("wonderwords") != "3.0.1", reason="the digests hold for the words of wonderwords 3.0.1"
)
@pytest.mark.parametrize(("task", "length", "seed", "chat"), DIGESTS)
def test_samples_are_those_of_the_original(
    task: str,
    length: int,
    seed: int,
    chat: bool,
    data: RulerData,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    samples = generate(
        task,
        words,
        length,
        SAMPLES,
        seed,
        data,
        (lambda text: CHAT.format(task_template=text)) if chat else None,
    )
    made = digest((s.input, s.answer_prefix, s.outputs, s.length) for s in samples)
    assert made == DIGESTS[task, length, seed, chat]
