"""Caches that others wrote come by their factories, and go the way of all others."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvret.cli import main
from hf_kvret.lab.evaluate.caches import artifact_sha256, choose_cache
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.report.results import Results
from hf_kvret.saved.identity import modules_state

from .runs import greedy

STRANGERS = '''
from contextlib import contextmanager
from functools import partial
from torch.nn import functional
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

pool = {}


class Old(DynamicCache):
    """Knows no keywords of later transformers."""

    def update(self, key_states, value_states, layer_idx):
        return super().update(key_states, value_states, layer_idx)


class Alone(Old):
    def __deepcopy__(self, memo):
        raise ValueError("cannot be copied")


class Pooled(Old):
    """Keeps its layers in a global."""

    layers = property(lambda s: [pool[id(x)] for x in [s]][0], lambda s, x: pool.update({id(s): x}))

    def __init__(self, config):
        super().__init__()
        self.layer_class_to_replicate = partial(self.layer_class_to_replicate)


class Ends:
    __slots__ = ()

    def update(self, *args):
        raise StopIteration

    __init__, get_query_offset = lambda *_, config: None, update


class Deaf(Old):
    """Forgets all keys but those of the newest token."""

    def update(self, key_states, value_states, layer_idx):
        keys, values = super().update(key_states, value_states, layer_idx)
        return (keys, values) if keys.shape[2] == key_states.shape[2] else (keys * 0, values)


class Holes(Old):
    """Has no numbers for the newest token."""

    def update(self, key_states, value_states, layer_idx):
        keys, values = super().update(key_states, value_states, layer_idx)
        return keys, values * float("nan") if key_states.shape[2] == 1 else values


def old(model, config, capacity, kind="Old"):
    assert capacity > 0
    return globals()[kind](config=config)


@contextmanager
def patched(model):
    yield None


def spoils(model, kind):
    layer, code = model.model.layers[0], modeling_llama
    inner = type(layer.mlp).forward
    {
        "forward": lambda: setattr(type(layer.mlp), "forward", lambda *x: 2 * inner(*x)),
        "a hook": lambda: layer.register_forward_pre_hook(print),
        "generate": lambda: setattr(model, "generate", print),
        "_attn_implementation": lambda: model.set_attn_implementation("eager"),
        "mlp": lambda: setattr(layer, "mlp", layer.self_attn),
        "apply_rotary_pos_emb": lambda: setattr(code, "apply_rotary_pos_emb", print),
        "get_seq_length": lambda: setattr(DynamicCache, "get_seq_length", lambda *_: 0),
        "is_sliding": lambda: setattr(DynamicCache, "is_sliding", property(print)),
        "from_pretrained": lambda: setattr(type(model), "from_pretrained", classmethod(print)),
        "scaled_dot": lambda: setattr(functional, "scaled_dot_product_attention", print),
        "sdpa": lambda: ALL_ATTENTION_FUNCTIONS.update(sdpa=print),
        "eager": lambda: ALL_MASK_ATTENTION_FUNCTIONS.register("eager", print),
        # As kvpress leaves it, and as transformers does.
        None: lambda: setattr(layer.self_attn, "rotary_emb", model.model.rotary_emb),
    }[kind]()
    if kind is None:
        model(model.dummy_inputs["input_ids"], output_hidden_states=True)
    return DynamicCache(config=model.config)


def answers(model):
    return lambda ids, **options: model.generate(ids, eos_token_id=None, **options)


def broken(model):
    raise RuntimeError("made for another transformers")
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(STRANGERS)
    return file


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(3, 400, (60,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("made", ["old", "old:kind=Alone", "old:kind=Pooled", "patched", "answers"])
def test_readers_of_strangers_fork_and_answer_as_full_attention(
    made: str, mine: Path, subject: Subject, text: torch.Tensor
) -> None:
    reader = Reader(subject.model, choose_cache(f"mine={mine}:{made}"), 80)
    reader.prefill(text[:50])
    for question in (text[50:53], text[53:58], text[50:53]):
        turn = reader.fork()
        expected = greedy(subject.model, torch.cat([text[:50], question]), 6)
        assert turn.answer(turn.feed(question), 6) == expected
    assert reader.length == 50
    assert (reader.usage().device_bytes >= 50 * 2 * 2 * 2 * 64 * 4) == (made != "answers")
    if made == "answers":
        with pytest.raises(CheckFailed, match="answers by itself"):
            reader.need_logits()


def test_whatever_ends_ends_a_cell(mine: Path, subject: Subject) -> None:
    ends = {f"{mine}:old:kind=Ends": "StopIteration", "sys:exit": "SystemExit", "builtins:id": "no"}
    for choice, why in ((choose_cache(f"mine={made}"), why) for made, why in ends.items()):
        with pytest.raises(CheckFailed, match=why), choice.guard(subject.model):
            Reader(subject.model, choice, 8).prefill(torch.arange(3, 8))


SPOILT = (
    "forward,a hook,generate,_attn_implementation,mlp,apply_rotary_pos_emb,get_seq_length,"
    "is_sliding,from_pretrained,scaled_dot,sdpa,eager"
)


@pytest.mark.parametrize("kind", SPOILT.split(","))
def test_a_model_that_stays_changed_is_put_back_and_ends_the_cell(
    kind: str, mine: Path, subject: Subject, text: torch.Tensor
) -> None:
    model: Any = copy.deepcopy(subject.model)
    before, choice = modules_state(model), choose_cache(f"mine={mine}:spoils:kind={kind}")
    attention, expected = model.config._attn_implementation, greedy(model, text, 4)
    # A package that patches while it is imported does so once, and its second cell fails, too.
    for _ in range(2):
        words = rf"mine:.*changes the model for good \({kind}.*make it a context manager"
        guard, opened = choice.guard(model), choice.open(model, 80)
        with pytest.raises(CheckFailed, match=words), guard, opened:
            pass
        assert modules_state(model) == before and "generate" not in vars(model)
        assert model.config._attn_implementation == attention
        assert greedy(model, text, 4) == expected


def test_a_patch_of_an_import_ends_all_rows_of_its_file(
    tmp_path: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from torch.nn import functional\nfunctional.gelu = print\n"
    make = "make = other = lambda model, bits=2: __import__('late') and model.generate\n"
    Path("patching").mkdir()
    for name in ("patches", "late", "patching/__init__"):
        Path(f"{name}.py").write_text(code + make)
    for name in ("imports", "patching/one", "patching/two"):
        Path(f"{name}.py").write_text(make)
    for made in (
        *("patches.py:make", "./patches.py:make:bits=4", "patches.py:other", "patches:make"),
        *("patching.one:make", "patching.two:make", "imports.py:make", "imports.py:make:bits=4"),
    ):
        choice = choose_cache(f"mine={made}")
        with pytest.raises(CheckFailed, match=r"for good \(gelu\)"), choice.guard(subject.model):
            Reader(subject.model, choice, 8).prefill(torch.arange(3, 8))


def test_hooks_that_see_outputs_and_new_parts_are_no_change(
    mine: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, model = choose_cache(f"mine={mine}:spoils:kind=none"), copy.deepcopy(subject.model)
    wraps: Any = FunctionType((lambda *_: 0).__code__, {"__name__": "kvpress.attention_patch"})
    with choice.guard(model), choice.open(model, 80):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", wraps)


FOREIGN = """
from __future__ import annotations
from dataclasses import dataclass
from transformers import DynamicCache
import beside_of_foreign

runs = beside_of_foreign.runs
runs.append(1)


@dataclass
class Options:
    bits: int = 2


class Context(DynamicCache):
    layers = None

    def __init__(self):
        pass

    def __enter__(self):
        return None

    def __exit__(self, *_):
        raise RuntimeError


def make(model, bits):
    import late_of_foreign
    made = Context()
    made.runs, made.bits = len(runs), Options(bits).bits + late_of_foreign.more
    return made
"""


@pytest.mark.parametrize("module", ["{}/foreign.py", "foreign"])
def test_a_factory_imports_its_neighbours_and_runs_once(
    module: str, tmp_path: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("foreign", "beside_of_foreign", "late_of_foreign"):
        # Undoing this removes the module that the test has imported.
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
        del sys.modules[name]
    file = tmp_path / "foreign.py"
    file.write_text(FOREIGN)
    (tmp_path / "beside_of_foreign.py").write_text("runs = []")
    (tmp_path / "late_of_foreign.py").write_text("more = 3")
    if module == "foreign":
        monkeypatch.chdir(tmp_path)
    choice, path = choose_cache(f"mine={module.format(tmp_path)}:make:bits=4"), [*sys.path]
    for _ in range(2):
        with choice.open(subject.model, 8) as cache:
            made: Any = cache
            assert (made.bits, made.runs, made.layers) == (7, 1, None)
    assert sys.path == path
    if module != "foreign":
        before = artifact_sha256(choice, subject.model.config)
        file.write_text(FOREIGN + "runs.append(2)")
        assert artifact_sha256(choice, subject.model.config) != before
        with choice.open(subject.model, 8) as cache:
            changed: Any = cache
            assert changed.runs == 3


def test_a_press_is_open_while_the_prompt_is_read(
    subject: Subject, text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class HalfPress:
        def __init__(self, ratio: float) -> None:
            given.append(ratio)

        @contextmanager
        def __call__(self, model: Any) -> Iterator[None]:
            given.append(model)
            yield
            given.append("closed")

    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(HalfPress=HalfPress))
    reader = Reader(subject.model, choose_cache("kvpress:Half:ratio=0.5"), 80)
    assert not given
    logits = reader.prefill(text)
    assert given == [0.5, subject.model, "closed"]
    assert reader.answer(logits, 4) == greedy(subject.model, text, 4)
    with pytest.raises(ValueError, match="write kvpress:NAME"):
        choose_cache("kvpress:Other")


@pytest.fixture
def run(tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Rows by cache, and what was printed, of a command with a failing cache; FILE is theirs."""

    def command(line: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / f"{line.split()[1]}.json"
        words = [word.replace("FILE", str(mine)) for word in line.split()]
        assert main([*words, "--json", str(file)]) == 1
        # RFC 8259 has no NaN.
        json.loads(file.read_text(), parse_constant=pytest.fail)
        rows = {cell["cache"]: row for cell, row in Results.load(file)}
        return rows, capsys.readouterr().out

    return command


CACHES = (
    "full,spoils=FILE:spoils:kind=forward,old=FILE:old,deaf=FILE:old:kind=Deaf,bad=FILE:broken,"
    "text=FILE:answers"
)


def test_every_task_takes_strangers_and_goes_on_behind_one_that_fails(
    run: Callable[..., Any], tiny_model_dir: Path, tiny_text: Path
) -> None:
    rows, printed = run(
        f"eval agreement --text {tiny_text} --context 64 --windows 1 --new-tokens 4 "
        f"--model {tiny_model_dir} --caches {CACHES}"
    )
    assert rows.keys() == {"full", "old", "deaf:kind=Deaf"}
    assert rows["old"]["kl_mean"] < 1e-6 < rows["deaf:kind=Deaf"]["kl_mean"]
    assert "bad (" in printed and "RuntimeError: made for another transformers" in printed
    assert "text answers by itself" in printed
    assert "changes the model for good (forward)" in printed
    rows, printed = run(
        f"eval niah --model {tiny_model_dir} --context 340 --depths 0,50 --samples 1 "
        f"--answer-tokens 4 --caches {CACHES}"
    )
    assert rows["old"]["answers"] == rows["full"]["answers"] == rows["text"]["answers"]
    # Both cells share one line.
    assert printed.count("made for another transformers") == 1 and "and 1 more" in printed


@pytest.mark.parametrize(
    "command",
    [
        "eval agreement --windows 1 --new-tokens 4 --caches full,",
        "eval ppl --windows 1 --caches full,",
        "eval arena --new-tokens 4 --depths 50 --answer-tokens 2 --caches full,",
        "tune --tokens 8 --windows 1 --methods ",
    ],
)
def test_what_is_no_number_is_null_in_json_and_a_dash_in_tables(
    command: str, run: Callable[..., Any], tiny_model_dir: Path, tiny_text: Path
) -> None:
    place = f" --model {tiny_model_dir} --text {tiny_text} --context 340 --plot FILE.png"
    line = f"{command}holes=FILE:old:kind=Holes,bad=FILE:broken{place}"
    # The second time the row is read from the file.
    for rows, printed in (run(line), run(line)):
        row = rows["holes:kind=Holes"]
        assert None in [row.get(x, 0.0) for x in ("kl_max", "nats", "kl")]
        lines = [x for x in printed.splitlines() if x.lstrip("| *").startswith("holes:kind=Holes")]
        assert "| - " in lines[0]
        assert command.split()[1] != "arena" or "| KL nan " in lines[1]


def test_bench_and_tune_take_strangers(
    run: Callable[..., Any], tiny_model_dir: Path, tiny_text: Path, tmp_path: Path
) -> None:
    rows, _ = run(
        "bench decode --device cpu --context 64 --steps 3 --warmup 1 --rounds 1 "
        "--caches old=FILE:old,bad=FILE:broken,text=FILE:answers"
    )
    assert rows["old"]["seconds"] > 0 and rows["old"]["check"].startswith("finite")
    assert "made for another" in rows["bad"]["check_failed"]
    assert "answers by itself" in rows["text"]["check_failed"]
    run(
        f"tune --model {tiny_model_dir} --text {tiny_text} --context 64 --tokens 8 --windows 1 "
        f"--methods old=FILE:old:kind=Old,bad=FILE:broken --out {tmp_path / 'choice.json'}"
    )
    choice = json.loads((tmp_path / "choice.json").read_text())
    assert choice == {"factory": f"{tmp_path / 'mine.py'}:old", "cache_config": {"kind": "Old"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine=module", "write NAME=MODULE:FACTORY"),
        ("full=module:make", "none of full"),
        ("mine=./nowhere.py:make", r"there is no file ./nowhere.py"),
        ("mine=module:make:bits", "'bits' is no option"),
    ],
)
def test_mistakes_in_a_factory_are_named(text: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        choose_cache(text)
