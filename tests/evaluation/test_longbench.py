"""``hf-kvret eval longbench`` on a made-up data set: every task's score, resuming, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvret.cli import main
from hf_kvret.evaluation.longbench import LONG_TASKS, PROMPTS, LongData
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.tasks.longbench import LongBench
from hf_kvret.evaluation.texts import token_ids

TASKS = ("qasper", "trec", "samsum", "passage_retrieval_en")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of four tasks, two samples each, a long one and a short one; also for LongBench-E."""
    folder = tmp_path_factory.mktemp("longbench")
    for task in TASKS:
        answers = ["Paragraph 3"] if task == "passage_retrieval_en" else ["the grass", "a sky"]
        samples = [
            {
                "context": " ".join(f"{n}. The grass is green and the sky blue." for n in rows),
                "input": "What is the answer?",
                "answers": answers,
                "length": length,
                "all_classes": ["the grass", "the sky"] if task == "trec" else None,
            }
            for rows, length in ((range(40), 9000), (range(3), 30))
        ]
        text = "\n".join(map(json.dumps, samples))
        for name in (f"{task}.jsonl", f"{task}_e.jsonl"):
            (folder / name).write_text(text)
    return folder


def _run(model: Path, data: Path, *more: str) -> int:
    common = ["eval", "longbench", "--model", str(model), "--data", str(data)]
    return main([*common, "--device", "cpu", *more])


def _cells(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(entry["cell"], entry["result"]) for entry in json.loads(path.read_text())["cells"]]


def test_all_caches_answer_and_covering_budgets_agree_with_full(
    tiny_model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    tasks = ("trec", "passage_retrieval_en")
    small = "recent=32:flush=32:dense_below=0"
    caches = ["full", f"flat:top_k=100000:{small}", f"paris:top_k=16:{small}"]
    options = ["--caches", ",".join(caches), "--tasks", ",".join(tasks), "--max-length", "520"]
    options += ["--json", str(out), "--plot", str(picture), "--questions", "both"]
    assert _run(tiny_model_dir, data_dir, *options) == 0
    found = {(c["task"], c["questions"], c["cache"]): r for c, r in _cells(out)}
    assert len(found) == len(tasks) * 2 * len(caches)
    for task in tasks:
        for questions in ("inside", "after"):
            full, flat = (found[task, questions, cache] for cache in caches[:2])
            assert flat["answers"] == full["answers"] and flat["scores"] == full["scores"]
            assert full["score"] == pytest.approx(100 * sum(full["scores"]) / 2)
            assert full["cut"] == 1 and full["max_length"] == 520
            assert any(full["answers"]) and full["buckets"] is None
            assert full["read_ratio"] == 1.0
            assert found[task, questions, caches[1]]["read_ratio"] > 0.9
            assert 0 < found[task, questions, caches[2]]["read_ratio"] < 0.2
    table = capsys.readouterr().out
    assert "mean less full" in table and "passage_retrieval_en" in table
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("task", ["trec", "samsum"])
def test_answers_are_those_of_generate(task: str, tiny_model_dir: Path, data_dir: Path) -> None:
    """The original asks ``generate``; its prompt and its stopping rules are written out here."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    # Makes line breaks likely, also as the first token, so that the stopping rules are at work.
    model.get_output_embeddings().weight.data[newline] *= 3
    (data_dir / f"model-{task}").mkdir(exist_ok=True)
    model.save_pretrained(data_dir / f"model-{task}")
    tokenizer.save_pretrained(data_dir / f"model-{task}")
    out = data_dir / f"generate-{task}.json"
    options = ["--tasks", task, "--caches", "full", "--max-length", "300", "--json", str(out)]
    assert _run(data_dir / f"model-{task}", data_dir, *options) == 0
    [(_, result)] = _cells(out)
    ends, firsts = [model.generation_config.eos_token_id], []
    for sample, answer in zip(LongData(data_dir).read(task), result["answers"], strict=True):
        text = PROMPTS[task].format(context=sample.context, input=sample.input)
        ids = token_ids(tokenizer, text)
        if len(ids) > 300:
            halves = (ids[:150].tolist(), ids[-150:].tolist())
            text = "".join(tokenizer.decode(half, skip_special_tokens=True) for half in halves)
            ids = token_ids(tokenizer, text)
        given = model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            max_new_tokens=LONG_TASKS[task].max_new_tokens,
            do_sample=False,
            **(
                {"eos_token_id": [*ends, newline], "min_length": len(ids) + 1}
                if task == "samsum"
                else {}
            ),
        )[0, len(ids) :]
        wanted = tokenizer.decode(given, skip_special_tokens=True)
        firsts.append(int(model(ids[None]).logits[0, -1].argmax()))
        # `generate` returns the line break that ended the answer, which never counts.
        assert answer == (wanted.removesuffix("\n") if task == "samsum" else wanted)
        assert "\n" in wanted
    # Without the rule that bars it, an answer of samsum would end before it began.
    assert task != "samsum" or newline in firsts


def test_longbench_e_scores_by_length(
    tiny_model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e.json"
    options = ["--tasks", "trec", "--caches", "full", "--max-length", "300", "--e"]
    assert _run(tiny_model_dir, data_dir, *options, "--json", str(out)) == 0
    [(_, result)] = _cells(out)
    long, short = result["scores"]
    assert result["buckets"] == {"0-4k": 100 * short, "4-8k": None, "8k+": 100 * long}
    table = capsys.readouterr().out
    assert "trec 8k+" in table and "mean 0-4k" in table


def test_the_table_leaves_out_means_of_unequal_tasks() -> None:
    results = Results("eval longbench", {"e": False})
    for cache, task, score in (
        ("full", "trec", 50.0),
        ("full", "qasper", 30.0),
        ("flat", "trec", 40.0),
        ("paris", "trec", 45.0),
        ("paris", "qasper", 20.0),
    ):
        cell = {"cache": cache, "task": task, "questions": "inside"}
        results.add(
            cell,
            {"score": score, "buckets": None, "read_ratio": 0.5, "step_bytes": 1, "full_bytes": 4},
        )
    rows = {
        line.split("|")[1].strip(): [part.strip() for part in line.split("|")[2:-1]]
        for line in LongBench.table(results).splitlines()
    }
    assert rows["qasper"] == ["30.00", "-", "20.00"]
    assert rows["mean"] == ["40.00", "-", "32.50"]
    assert rows["mean less full"] == ["+0.00", "-", "-7.50"]
    assert rows["cold rows read"] == ["50.00%"] * 3
    assert list(rows).index("qasper") < list(rows).index("trec")
    # Only trec was asked of all three.
    assert LongBench.accuracy(results)["paris"] == pytest.approx((0.25, 0.45))


def test_results_of_other_data_are_not_gone_on_with(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = {"context": "a b", "input": "c", "answers": ["d"], "length": 2, "all_classes": ["d"]}
    file, out = tmp_path / "trec.jsonl", tmp_path / "r.json"
    file.write_text(json.dumps(sample))
    options = ["--tasks", "trec", "--caches", "full", "--max-length", "200", "--json", str(out)]
    assert _run(tiny_model_dir, tmp_path, *options) == 0
    file.write_text(json.dumps(sample | {"answers": ["e"]}))
    assert _run(tiny_model_dir, tmp_path, *options) == 2
    assert "made with another set-up (data was" in capsys.readouterr().err


def test_mistakes_are_one_line_each(
    tiny_model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*more: str) -> str:
        assert _run(tiny_model_dir, data_dir, "--caches", "full", *more) == 2
        return capsys.readouterr().err

    assert "--tasks musique: no LongBench-E task" in error("--tasks", "musique", "--e")
    assert "has no lcc.jsonl" in error("--tasks", "lcc")
    assert "no chat template" in error("--tasks", "qasper", "--max-length", "99", "--chat")
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"qasper": "{input}{context}:"}')
    own = ["--prompts", str(prompts)]
    assert "no template for trec" in error("--tasks", "trec", *own)
    assert "stands before the context" in error("--tasks", "qasper", "--questions", "after", *own)
    assert main(["eval", "longbench", "--data", str(tmp_path / "none")]) == 2
    assert "no such folder or file" in capsys.readouterr().err
    assert main(["eval", "longbench"]) == 2
    assert "give one of --data and --hub-id" in capsys.readouterr().err


def test_a_model_of_few_positions_asks_for_a_length(
    tiny_model_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.config.max_position_embeddings = 1000
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    assert _run(tmp_path, data_dir, "--tasks", "trec", "--caches", "full") == 2
    assert "has 1000 positions, too few" in capsys.readouterr().err
    assert _run(data_dir, data_dir, "--model", "needle", "--tasks", "trec") == 2
    assert "needs a tokenizer" in capsys.readouterr().err


def test_prompts_of_the_user_are_used(
    tiny_model_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, seen = tmp_path / "prompts.json", []
    prompts.write_text('{"qasper": "{context} <- {input}"}')
    original = LongBench._answer

    def watching(self: LongBench, prompt: Any, *rest: Any) -> Any:
        seen.append(prompt)
        return original(self, prompt, *rest)

    monkeypatch.setattr(LongBench, "_answer", watching)
    options = ["--tasks", "qasper", "--caches", "full", "--prompts", str(prompts)]
    assert _run(tiny_model_dir, data_dir, *options, "--questions", "after") == 0
    assert [prompt.question for prompt in seen] == [" <- What is the answer?"] * 2
    assert seen[1].context.startswith("0. The grass is green")
