"""lm-evaluation-harness runs through a retrieval cache, and never without one unnoticed."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.lm_eval import add_lm_eval_parser, cache_options, run_lm_eval

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)
SMALL = {"dense_below": 0, "recent": 8, "flush": 8}
TEXTS = (
    "The grass is green. The sky is blue. Here we go. " * 3,
    "One of the special magic numbers",
)


def _task(folder: Path, name: str, **changes: Any) -> None:
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.json")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["###"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(content | changes))


@pytest.fixture
def arguments(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """lm-eval's arguments but for tasks and cache, with a task of each kind in ``tmp_path``."""
    from lm_eval import tasks

    # lm-eval would read its own 14,000 task files each time, which takes ten seconds.
    ours_alone = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", ours_alone)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    lines = [json.dumps({"text": text, "answer": "x"}) for text in TEXTS]
    (tmp_path / "data.json").write_text("\n".join(lines))
    _task(tmp_path, "tiny_echo")
    metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["x", "y"], "doc_to_target": 0}
    _task(tmp_path, "tiny_choice", metric_list=metric, generation_kwargs=None, **choice)
    rolling = [{"metric": "word_perplexity", "aggregation": "weighted_perplexity"}]
    _task(
        tmp_path,
        "tiny_rolling",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        generation_kwargs=None,
        metric_list=rolling,
    )
    model = ["--model", "hf", "--model_args", f"pretrained={tiny_model_dir},dtype=float32"]
    return [*model, "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "2"]


def _answers(folder: Path) -> list[str]:
    [file] = folder.rglob("samples_tiny_echo_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return [sample["resps"][0][0] for sample in sorted(samples, key=lambda one: one["doc_id"])]


def _plain(arguments: list[str], gen_kwargs: dict[str, Any] | None = None) -> list[str]:
    """The answers of lm-eval's own model ``hf``, asked from Python."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model="hf",
        model_args=arguments[3],
        tasks=["tiny_echo"],
        task_manager=TaskManager(include_path=arguments[5]),
        device="cpu",
        batch_size=2,
        gen_kwargs=gen_kwargs,
    )
    return [sample["resps"][0][0] for sample in results["samples"]["tiny_echo"]]


@needs_lm_eval
def test_covering_budgets_answer_like_full_attention_and_small_ones_retrieve(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = _plain(arguments)
    echo = [*arguments, "--tasks", "tiny_echo", "--log_samples", "--gen_kwargs"]
    out = ["--output_path", str(tmp_path / "flat")]
    everything = SMALL | {"top_k": 100_000}
    assert run_lm_eval(["--", *echo, "cache_implementation=flat", *out], everything) == 0
    assert _answers(tmp_path / "flat") == full
    assert "flat: 1 batches generated, 1 of them with retrieval" in capsys.readouterr().out

    out = ["--output_path", str(tmp_path / "paris")]
    few = SMALL | {"top_k": 4}
    named = json.dumps({"cache_implementation": "paris", "cache_config": few})
    assert run_lm_eval(["run", *echo, named, *out]) == 0
    assert "paris: 1 batches generated, 1 of them with retrieval" in capsys.readouterr().out
    paris = _answers(tmp_path / "paris")
    # The long text loses most of its tokens, so that its answer shows the cache at work.
    assert paris[0] != full[0]
    # The way through Python alone takes the same cache.
    gen_kwargs = {"cache_implementation": "paris", "cache_config": few}
    assert _plain(arguments, gen_kwargs) == paris


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("lm_eval", "jieba", "fuzzywuzzy", "rouge")),
    reason="lm-eval[longbench] is not installed",
)
def test_longbench_of_lm_eval_runs_on_local_data(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import lm_eval.tasks

    original = Path(lm_eval.tasks.__file__).parent / "longbench" / "2wikimqa.yaml"
    text = {"context": TEXTS[0], "question": "What is green?", "answers": ["the grass"]}
    data = tmp_path / "2wikimqa.jsonl"
    data.write_text(json.dumps(text))
    # Everything but the place of the data is lm-eval's own.
    local = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    named = {"include": str(original), "dataset_name": None, "task": "longbench_2wikimqa_local"}
    (tmp_path / "local.yaml").write_text(json.dumps(named | local))
    out = ["--output_path", str(tmp_path / "out"), "--log_samples"]
    cache = ["--gen_kwargs", "cache_implementation=paris", *out]
    command = [*arguments, "--tasks", "longbench_2wikimqa_local", *cache]
    assert run_lm_eval(command, SMALL | {"top_k": 4}) == 0
    assert "paris: 1 batches generated, 1 of them with retrieval" in capsys.readouterr().out
    [file] = (tmp_path / "out").rglob("samples_longbench_*.jsonl")
    sample = json.loads(file.read_text())
    assert TEXTS[0] in sample["arguments"]["gen_args_0"]["arg_0"]
    assert 0 <= sample["qa_f1_score"] <= 1


@needs_lm_eval
def test_answers_without_retrieval_are_said_to_be(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts that are too short, and answers of an earlier run, which are no measurement."""
    echo = [*arguments, "--tasks", "tiny_echo", "--gen_kwargs", "cache_implementation=flat"]
    echo += ["--use_cache", str(tmp_path / "kept")]
    assert run_lm_eval(echo) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "0 of them with retrieval. The texts were too short" in last
    with pytest.raises(ValueError, match="lm-eval generated nothing"):
        run_lm_eval(echo)


@needs_lm_eval
@pytest.mark.parametrize("tasks", ["tiny_choice", "tiny_rolling", "tiny_echo,tiny_choice"])
def test_tasks_that_use_no_cache_are_refused(tasks: str, arguments: list[str]) -> None:
    cache = ["--gen_kwargs", "cache_implementation=paris"]
    with pytest.raises(ValueError, match=f"{tasks.split(',')[-1]}: asks for log-likelihoods"):
        run_lm_eval([*arguments, "--tasks", tasks, *cache])


@needs_lm_eval
def test_full_attention_is_lm_evals_own_model(arguments: list[str], tmp_path: Path) -> None:
    full = _plain(arguments)
    echo = [*arguments, "--tasks", "tiny_echo", "--log_samples", "--output_path", str(tmp_path)]
    assert run_lm_eval([*echo, "--gen_kwargs", "cache_implementation=paris"], "full") == 0
    assert _answers(tmp_path) == full


def test_each_cache_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(words: list[str], check: bool) -> Any:
        calls.append(words[3:])
        return argparse.Namespace(returncode=len(calls) // 2)

    monkeypatch.setattr("hf_kvret.lab.evaluate.lm_eval.subprocess.run", run)
    given, rest = ["full", '{"top_k": 8}', "{}"], ["--", "--tasks", "x,y"]
    parser = argparse.ArgumentParser()
    add_lm_eval_parser(parser.add_subparsers())
    words = ["lm-eval", *(w for x in given for w in ("--cache-config", x)), *rest]
    options = parser.parse_args(words)
    assert options.run(options) == 1, "the second fails, and ends it"
    heads = [["lm-eval", "--cache-config", one] for one in given[:2]]
    assert [call[:3] for call in calls] == heads
    assert all(call[3:] == rest for call in calls)
    single: list[Any] = []
    monkeypatch.setattr(
        "hf_kvret.lab.evaluate.lm_eval.run_lm_eval", lambda *given: single.append(given) or 0
    )
    options = parser.parse_args(["lm-eval", "--cache-config", "{}", *rest])
    assert options.run(options) == 0 and single[0][0][-2:] == rest[1:] and single[0][1] == {}


PARIS = "cache_implementation=paris"
TWICE = json.dumps({"cache_implementation": "paris", "cache_config": {"top_k": 4}})
# What stands behind --tasks, options of the cache, and what is said of them.
MISTAKES: list[tuple[list[str], dict[str, Any], str]] = [
    ([], {}, "cache_implementation=None: name one of .*paris"),
    (["--gen_kwargs", "cache_implementation=dynamic"], {}, "cache_implementation='dynamic'"),
    (["--gen_kwargs", PARIS], {"nothing": 1}, "no option 'nothing'"),
    (["--gen_kwargs", TWICE], {"top_k": 8}, "top_k is both"),
    (["--gen_kwargs", PARIS, "cache_config=3"], {}, "cache_config=3, no dict"),
    (["--gen_kwargs", PARIS, "--model", "vllm"], {}, "only lm-eval's model hf"),
]


@needs_lm_eval
def test_mistakes_are_refused_before_a_model_is_loaded(
    arguments: list[str], tiny_model_dir: Path
) -> None:
    import torch

    from hf_kvret.lab.evaluate.lm_eval_model import RetrievalLM

    arguments[3], argv = "pretrained=there-is-no-such-model", sys.argv
    for words, options, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            run_lm_eval([*arguments, "--tasks", "tiny_echo", *words], options)
    with pytest.raises(ValueError, match="only runs tasks here"):
        run_lm_eval(["ls", "tasks"])
    assert sys.argv is argv
    model = RetrievalLM(pretrained=str(tiny_model_dir), device="cpu")
    with pytest.raises(ValueError, match="cache_implementation=None: name one of"):
        model._model_generate(torch.ones(1, 4, dtype=torch.long), 8, [])


def test_a_missing_lm_eval_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'lm-eval"):
        run_lm_eval(["--tasks", "x"])


def test_options_of_the_cache_are_json() -> None:
    assert cache_options('{"top_k": 8}') == {"top_k": 8} and cache_options("full") == "full"
    for bad in ("{", "3"):
        with pytest.raises(argparse.ArgumentTypeError, match="JSON"):
            cache_options(bad)
