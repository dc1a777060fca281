"""Many facts of one text, from the command line to table and picture."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_kvret.lab.evaluate.needles import Document
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.facts import FactList, list_wording, listed_share
from hf_kvret.lab.evaluate.texts import encode
from hf_kvret.lab.report.results import Results

from .runs import greedy, run_eval

_run = partial(run_eval, "facts")
# Everything beyond 40 tokens is cold and all of it is selected.
COVERING = "top_k=4096:dense_below=0:recent=16:flush=24"
TIGHT = "top_k=8:dense_below=0:recent=16:flush=24"
TEMPLATE = "<s>{{ messages[0].content }}</s>{% if add_generation_prompt %}now: {% endif %}"


def _document(subject: Subject, length: int, count: int) -> Document:
    depths = [100 * (fact + 0.5) / count for fact in range(count)]
    wording = list_wording(subject, None, count)
    return wording.document(np.random.default_rng(0), length, depths, 1)


def test_the_command_gives_what_plain_forward_passes_give(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, subject: Subject
) -> None:
    caches = ["full", f"flat:{COVERING}", f"paris:{COVERING}", f"flat:{TIGHT}"]
    arguments = ["--model", str(tiny_model_dir), "--essays", str(tiny_text), "--context", "600"]
    arguments += ["--facts", "2", "--samples", "2"]
    picture, table = tmp_path / "facts.png", tmp_path / "facts.md"
    files = ["--plot", str(picture), "--table", str(table)]
    cells = _run(tmp_path / "facts.json", *arguments, "--caches", ",".join(caches), *files)
    rows = {one["cell"]["cache"]: one["result"] for one in cells}
    full, flat, paris, tight = (rows[cache] for cache in caches)
    assert flat["answers"] == paris["answers"] == full["answers"] != tight["answers"]
    # Sinks are rows of the store too, and are never selected.
    assert 0 < tight["read_ratio"] < 0.3 and 0.98 < flat["read_ratio"] <= 1
    assert picture.stat().st_size > 1000
    lines = [" ".join(line.split()) for line in table.read_text().splitlines()]
    assert lines[0] == (
        "| cache | length | facts listed, % | over full | complete lists, % | cold rows read, % |"
    )
    assert lines[2] == "| full | 600 | 0.0 | +0.0 | 0 | 100.00 |"

    wording = list_wording(subject, tiny_text, 2)
    rng = np.random.default_rng([42, 600, 1])
    document = wording.document(rng, 600, [25, 75], 1, start=0.5)
    (fact,) = document.facts
    prompt = torch.cat([document.context, torch.tensor(fact.question)])
    assert len(prompt) + wording.answer_len == 600
    expected = wording.text(greedy(subject.model, prompt, wording.answer_len, wording.stop))
    assert full["answers"][1] == {"expected": fact.answer, "given": expected}


def test_all_facts_stand_in_the_text_at_even_depths(subject: Subject) -> None:
    document = _document(subject, 1200, 4)
    text = subject.need_tokenizer("facts").decode(document.context)
    values = document.facts[0].answer.split()
    assert len(set(values)) == 4
    places = [text.index(f" is: {value}.") / len(text) for value in values]
    assert places == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.1)


def test_a_chat_template_stands_around_text_and_question(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = subject.need_tokenizer("facts")
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    document = _document(subject, 1200, 2)
    first, *others = encode(tokenizer, "<s>")
    assert document.context[0] == first and first not in document.context[1:] and not others
    question = tokenizer.decode(document.facts[0].question)
    asked, end, prefix = question.partition("</s>")
    assert asked.endswith("mentioned in the provided text?") and end
    assert prefix.startswith("now: The special magic numbers") and prefix.endswith("are:\n-")


def test_a_number_within_a_longer_one_does_not_count() -> None:
    assert listed_share("123 456 789 12", " 123\n- 45678, 789.") == 0.5


def test_shares_of_facts_and_of_complete_lists_are_counted(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([1.0, 0.5, 0.0, 1.0])
    module = "hf_kvret.lab.evaluate.tasks.facts"
    monkeypatch.setattr(f"{module}.listed_share", lambda answer, reply: next(shares))
    path, arguments = tmp_path / "f.json", ["--context", "400", "--facts", "2", "--samples", "4"]
    (cell,) = _run(path, "--model", str(tiny_model_dir), *arguments, "--caches", "full")
    assert cell["result"]["score"] == 0.625 and cell["result"]["complete"] == 0.5
    assert FactList.accuracy(Results.load(path))["full"] == (1.0, 0.625)
