"""Long generations: recall for each stretch, and the three ways to get the next token."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache, ParisKVCache
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader, UsageSum
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.longgen import LongGeneration
from hf_kvret.lab.evaluate.teacher_forcing import (
    Pace,
    greedy_source,
    mean_of,
    mean_sections,
    sampling_source,
    walk,
)
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.report.results import Results
from hf_kvret.observe.recall import recalls_of

from .runs import results_by_cache

_run = partial(results_by_cache, "longgen")
REGIONS: dict[str, Any] = {"dense_below": 0, "recent": 16, "flush": 16}
SMALL = ":".join(f"{name}={value}" for name, value in REGIONS.items())
LENGTH, NEW, EVERY = 120, 60, 24


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--context", str(LENGTH)]
    return [*arguments, "--new-tokens", str(NEW), "--every", str(EVERY)]


def test_each_stretch_has_the_recall_of_its_own_tokens(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, subject: Subject
) -> None:
    """Against one cache that is never forked, whose recalls are cut into stretches here."""
    paris, flat = f"paris:top_k=8:{SMALL}", f"flat:top_k=8:{SMALL}"
    picture = tmp_path / "l.png"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", f"full,{flat},{paris}"]
    rows = _run(tmp_path / "l.json", *arguments, "--plot", str(picture))
    assert picture.stat().st_size > 1000
    (window,) = text_windows(subject, "test", tiny_text, LENGTH, NEW, 1, None)
    cache = ParisKVCache(subject.model.config, top_k=8, track_recall=True, **REGIONS)
    choices = []
    with torch.inference_mode():
        subject.model(window[None, :LENGTH], past_key_values=cache)
        for token in window[LENGTH:]:
            logits = subject.model(token.view(1, 1), past_key_values=cache).logits
            choices.append(int(logits[0, -1].argmax()))
        expected_choices = subject.model(window[None]).logits[0, LENGTH:].argmax(-1)
    stretches = rows[paris]["stretches"]
    assert [one["end"] for one in stretches] == [24, 48, 60]
    starts = [0, 24, 48]
    for start, one in zip(starts, stretches, strict=True):
        recalls = [
            recall
            for layer in cache.retrieval_layers
            for recall in recalls_of(layer)[start : one["end"]]
        ]
        for name in ("overlap", "mass", "best_mass"):
            mean = sum(getattr(recall, name) for recall in recalls) / len(recalls)
            assert one[name] == pytest.approx(mean, rel=1e-6)
        equal = torch.tensor(choices[start : one["end"]]) == expected_choices[start : one["end"]]
        assert one["equal"] == pytest.approx(float(equal.double().mean()))
    assert all(one["overlap"] == 1 for one in rows[flat]["stretches"])
    assert any(one["overlap"] < 1 for one in stretches)
    assert all(one["overlap"] is None and one["equal"] == 1 for one in rows["full"]["stretches"])


def test_larger_steps_find_nearly_the_same(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"paris:top_k=8:{SMALL}"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", cache]
    single = _run(tmp_path / "1.json", *arguments)[cache]["stretches"]
    several = _run(tmp_path / "4.json", *arguments, "--step", "4")[cache]["stretches"]
    assert [one["end"] for one in several] == [one["end"] for one in single]
    assert "4 tokens a forward pass, not one." in capsys.readouterr().out
    # Flushes fall on other tokens, so a few tokens are cold a little earlier or later.
    assert mean_of(several, "overlap") == pytest.approx(mean_of(single, "overlap"), abs=0.03)


def test_a_full_budget_generates_as_full_attention(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path
) -> None:
    caches = ["full", f"flat:top_k=1.0:{SMALL}", f"paris:top_k=1.0:{SMALL}"]
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", ",".join(caches)]
    for follow in ("greedy", "sample"):
        rows = _run(tmp_path / f"{follow}.json", *arguments, "--follow", follow)
        for cache in caches:
            assert all(one["equal"] == 1 for one in rows[cache]["stretches"])
        for cache in caches[1:]:
            assert all(one["mass"] == pytest.approx(1) for one in rows[cache]["stretches"])


def test_tokens_of_its_own_are_greedy_or_drawn(tiny_text: Path, subject: Subject) -> None:
    (context,) = text_windows(subject, "test", tiny_text, LENGTH, 0, 1, None)

    def generated(source: Any) -> list[int]:
        reader = Reader(subject.model, choose_cache(f"flat:top_k=8:{SMALL}"), LENGTH + 20)
        logits = reader.prefill(context)[-1]
        done = walk(reader, logits, source, Pace(20, 8), UsageSum())
        assert done.reader.length == LENGTH + 20 and len(done.choices) == 20
        return done.tokens.tolist()

    cache = FlatKVCache(subject.model.config, top_k=8, **REGIONS)
    with torch.inference_mode():
        logits = subject.model(context[None], past_key_values=cache).logits
        expected = []
        for _ in range(20):
            expected.append(int(logits[0, -1].argmax()))
            logits = subject.model(torch.tensor([expected[-1:]]), past_key_values=cache).logits
    assert generated(greedy_source) == expected
    drawn = [generated(sampling_source(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] != expected


def test_another_text_may_follow(tmp_path: Path, tiny_text: Path, subject: Subject) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0123456789 " * 60)
    pairs = text_windows(subject, "test", tiny_text, 50, 20, 2, other)
    alone = text_windows(subject, "test", tiny_text, 50, 0, 2, None)
    rest = subject.need_tokenizer("test")(other.read_text())["input_ids"]
    assert len(pairs) == 2
    for number, (pair, context) in enumerate(zip(pairs, alone, strict=True)):
        assert torch.equal(pair[:50], context)
        assert pair[50:].tolist() == rest[20 * number : 20 * number + 20]


def test_means_weigh_tokens_and_skip_what_is_missing() -> None:
    samples = [
        [{"end": 8, "mass": 0.5, "equal": 1.0}, {"end": 12, "mass": 1.0, "equal": 0.0}],
        [{"end": 8, "mass": None, "equal": 0.5}, {"end": 12, "mass": 0.5, "equal": 0.0}],
    ]
    means = mean_sections(samples)
    assert means == [
        {"end": 8, "mass": None, "equal": 0.75},
        {"end": 12, "mass": 0.75, "equal": 0.0},
    ]
    assert mean_of(means, "equal") == 0.5 and mean_of(means, "mass") == 0.75
    assert mean_of([{"end": 8, "mass": None}], "mass") is None


def test_table_and_picture_do_without_recall(tmp_path: Path) -> None:
    results = Results("eval longgen", {"follow": "text"})
    stretch = {"end": 8, "overlap": None, "mass": None, "best_mass": None, "equal": 0.5}
    results.add({"cache": "static", "length": 64}, {"stretches": [stretch], "read_ratio": None})
    last = LongGeneration.table(results).splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["static", "64", *["-"] * 7, "0.500", "-"]
    LongGeneration.plot(tmp_path / "l.png", results)
    assert (tmp_path / "l.png").stat().st_size > 1000
