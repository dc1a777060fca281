"""``hf-kvret tune`` from end to end, on models that take no time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret.cli import main
from hf_kvret.generate.attach import restore
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.evaluate.texts import read_text, token_ids
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.tune.command import Tune
from hf_kvret.lab.tune.variants import Walker, cut_windows, make_variants

from ..evaluate.runs import flat_logits

SMALL = "recent=16:flush=16"
SIZES = ["--context", "256", "--tokens", "16", "--windows", "2"]
BUDGETS = ["--top-k", "16,64"]
NEEDLE = ["--model", "needle", *SIZES, *BUDGETS, "--methods", f"paris:{SMALL}"]


def tune(*arguments: str) -> int:
    return main(["tune", *arguments])


@pytest.fixture
def walked(watch: Any) -> list[tuple[str, int]]:
    """The variants and windows that are measured, as they come."""
    return watch(Walker, "row", lambda self, variant, window: (variant.name, window))


def test_a_choice_is_printed_written_and_fits_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], walked: list[tuple[str, int]]
) -> None:
    files = [tmp_path / name for name in ("t.json", "c.json", "t.png")]
    names = ("--json", "--out", "--plot")
    where = [word for pair in zip(names, map(str, files), strict=True) for word in pair]
    assert tune(*NEEDLE, "--agreement", "0.5", *where) == 0
    # 2 budgets, with and without a rest; eight tokens leave out none of them.
    assert walked == [(name, window) for window in (0, 1) for name, _ in walked[:4]]
    assert len(set(walked)) == 2 * 2 * 2
    out = capsys.readouterr().out
    results = Results.load(files[0])
    pasted = json.loads(files[1].read_text())
    assert json.dumps(pasted) in out and Tune.table(results) in out
    assert pasted["cache_implementation"] == "paris"
    [bold] = [line for line in out.splitlines() if line.startswith("| **")]
    assert f"top_k={pasted['cache_config']['top_k']}:" in bold and "| 16 " in bold
    assert pasted["cache_config"].items() >= {"recent": 16, "flush": 16}.items()
    assert files[2].read_bytes().startswith(b"\x89PNG")
    full = results.find({"cache": "full", "window": 0})
    assert full is not None and full["equal"] == full["tokens"] == 8 and full["kl"] == 0
    subject = load_subject("needle")
    tokens = torch.randint(264, 512, (1, 300))
    generated = subject.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, **pasted
    )
    assert generated.shape == (1, 302)
    restore(subject.model)


def test_the_numbers_are_those_of_an_independent_run(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path
) -> None:
    file = tmp_path / "t.json"
    method = f"flat:{SMALL}:dense_below=0:rest=mean"
    place = ["--model", str(tiny_model_dir), "--text", str(tiny_text)]
    words = [*place, *SIZES, "--methods", method, "--top-k", "8"]
    assert tune(*words, "--json", str(file)) == 0
    subject = load_subject(str(tiny_model_dir))
    assert subject.tokenizer is not None
    ids = token_ids(subject.tokenizer, read_text(tiny_text))[1:]
    bos = subject.tokenizer.bos_token_id
    windows = cut_windows(ids, 256, 8, 2, bos=bos, seed=42)
    results, equal = Results.load(file), 0
    for number, window in enumerate(windows):
        own = flat_logits(subject, window[:256], 8, window[256:264].tolist())
        with torch.inference_mode():
            whole = subject.model(window[None, :264]).logits[0, -8:]
        row = results.find({"cache": f"{method}:top_k=8", "window": number})
        assert row is not None
        kl = torch.nn.functional.kl_div(
            own.log_softmax(-1), whole.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        assert row["equal"] == int((own.argmax(-1) == whole.argmax(-1)).sum())
        # fp32 here, fp64 there, over 400 tokens.
        assert row["kl"] == pytest.approx(float(kl.sum()), rel=1e-3)
        assert 0 < row["step_bytes"] < row["full_bytes"] and row["ms"] > 0
        equal += row["equal"]
    # A budget of 8 must matter, or nothing is tested.
    assert equal < 16


def test_a_fork_is_measured_like_a_cache_of_its_own() -> None:
    """Whichever variant came first, and whatever options the filled cache has."""
    subject = load_subject("needle")
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(264, 512, (124,), generator=generator)]
    texts = [f"paris:{SMALL}", f"lrqk:{SMALL}:rest=mean"]
    variants = make_variants(texts, [16, 80], 120)
    shared = Walker(subject, windows, 4)
    for one in variants.values():
        name = one.name if "rest=" in one.name else f"{one.name}:rest=mean"
        [alone] = make_variants([name], [], 120).values()
        assert not alone.changes
        got, want = shared.row(one, 0), Walker(subject, windows, 4).row(alone, 0)
        for name in ("tokens", "equal", "step_bytes", "device_bytes"):
            assert got[name] == want[name], (one.name, name)
        assert got["kl"] == pytest.approx(want["kl"], rel=1e-3, abs=1e-9)


def test_an_interrupted_tuning_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    walked: list[tuple[str, int]],
) -> None:
    words = [*NEEDLE, "--methods", f"paris:{SMALL}:rest=none", "--json", str(tmp_path / "t.json")]
    whole = Walker.row

    def interrupted(self: Walker, variant: Any, window: int) -> Any:
        if len(walked) == 3:
            raise KeyboardInterrupt
        return whole(self, variant, window)

    with monkeypatch.context() as patch:
        patch.setattr(Walker, "row", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(*words, "--agreement", "0.5")
    assert "Not finished" in capsys.readouterr().out
    before = list(walked)
    assert tune(*words, "--agreement", "0.5") == 0
    assert len(walked) == len(set(walked)) == 4 and walked[:3] == before
    assert "were finished already" in capsys.readouterr().out
    assert tune(*words, "--agreement", "0.5") == 0
    assert len(walked) == 4
    assert tune(*words, "--agreement", "0.6") == 2
    assert "agreement was 0.5, now 0.6" in capsys.readouterr().err


def test_a_target_that_is_missed_is_told(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--model", str(tiny_model_dir), "--text", str(tiny_text), *SIZES]
    assert tune(*place, "--methods", f"flat:{SMALL}", "--top-k", "1,2", "--agreement", "1") == 0
    out = capsys.readouterr().out
    assert "MISSED: no variant has an agreement of 1" in out and '"top_k"' in out


def test_a_cache_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill, fills = Walker._fill, []

    def short(self: Walker, choice: Any, window: int) -> Any:
        fills.append(choice.name)
        if choice.method == "flat":
            raise MemoryError("no room")
        return fill(self, choice, window)

    monkeypatch.setattr(Walker, "_fill", short)
    methods = f"flat:{SMALL}:rest=none,paris:{SMALL}:rest=none"
    assert tune(*NEEDLE, "--agreement", "0.5", "--methods", methods) == 0
    out = capsys.readouterr().out
    assert "Out of memory: flat:" in out and '"cache_implementation": "paris"' in out
    assert any(name.startswith("flat") for name in fills)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "fewer than the 8,192 of --context and the 1,024 of --tokens"),
        ("--context 1M", "the model knows 65536 positions"),
        ("--context 400", "attends to everything up to 773 tokens (sink, recent and flush)"),
        ("--methods full", "unknown: full; choose among flat, paris"),
        ("--methods a2ats", "write a2ats:artifact=FOLDER"),
        ("--out FOLDER", "is a folder: give a file in it"),
        ("--out FOLDER/a --json FOLDER/a", "a: give each its own file"),
        ("--plot FOLDER/a.png --json FOLDER/a.png", "a.png: give each its own file"),
        ("--out TEXT", "holds something else: give another file"),
        ("--context 16", "--context 16: give a longer context, or --top-k"),
        ("--model needle", "leave --text out"),
    ],
)
def test_mistakes_are_one_line_each(
    words: str, message: str, tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, program: Any
) -> None:
    place = ["--model", tiny_model_dir, "--text", tiny_text]
    more = words.replace("FOLDER", str(tmp_path)).replace("TEXT", str(tiny_text)).split()
    error = program("tune", *place, *more, status=2).err.splitlines()[-1]
    assert message in error and "error: " in error


def test_a_model_of_text_needs_a_text(program: Any) -> None:
    assert "give --text FILE" in program("tune", "--model", "reference", status=2).err
