"""``hf-kvret models``: the list, one type, a configuration of the user's, the page, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, MistralConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_kvret.cli import main
from hf_kvret.lab.coverage import command
from hf_kvret.lab.coverage import record as record_module
from hf_kvret.lab.coverage.record import Record, Setup
from hf_kvret.lab.coverage.scan import ModelType, default_type
from hf_kvret.lab.coverage.table import BEGIN, END, Row, details, lines, make_rows, write_page
from hf_kvret.lab.coverage.trial import Trial

NAMES = ("bloom", "gemma3", "gpt2", "jamba", "mistral")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of five types; all of them takes seconds."""
    monkeypatch.setattr(command, "scan", lambda: [default_type(name) for name in NAMES])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["models", *words]) == 2
    return capsys.readouterr().err


def test_the_list_has_a_line_for_each_type_that_fits_the_terminal(
    few: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["models"]) == 0
    header, *shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == list(NAMES)
    assert max(map(len, shown)) <= 72 and header.split()[-4:] == ["KiB", "graph", "not", "in"]
    assert shown[0].startswith("bloom    refused     computes attention by itself and ignores")
    assert shown[1].split()[1:] == ["tried", "4/26", "4x(256+256)", "16", "yes"]
    assert shown[2].split()[1:] == ["all", "modes", "12/12", "12x(64+64)", "36", "yes"]
    assert shown[3].split()[1:] == ["tried", "4/32", "8x(128+128)", "16"]


def test_one_type_says_all_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    if "bailing_hybrid" not in CONFIG_MAPPING:
        pytest.skip("bailing_hybrid came with a newer transformers")
    assert main(["models", "--type", "bailing_hybrid"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "7 of 42, others are recurrent",
        "1 x (512 + 64)",
        "8,064 in bf16",
        "in all modes",
    ):
        assert words in shown
    assert main(["models", "mistral"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "because mistral has no full-attention layer" in shown and "other settings" in shown


def test_a_configuration_of_the_users_is_told_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MistralConfig(sliding_window=None, num_hidden_layers=3).save_pretrained(tmp_path / "full")
    LlamaConfig(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=5
    ).save_pretrained(tmp_path / "small")
    assert main(["models", str(tmp_path / "full"), "--json"]) == 0
    full = json.loads(capsys.readouterr().out)
    assert (full["type"], full["default"]["layers"]) == ("mistral", {"full": 3})
    assert main(["models", str(tmp_path / "small"), "--json"]) == 0
    small = json.loads(capsys.readouterr().out)
    assert (small["rows"], small["bytes_a_token"]) == ("2 x (32 + 32)", 5 * 2 * 64 * 2)


def test_the_page_keeps_what_stands_around_the_tables(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        assert main(["models", "--md", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n\n5 types of transformers")
    assert text.endswith(f"\n\n{END}\nafter\n") and "old" not in text
    assert text.count("| `jamba` | tried | 4 of 32, others are recurrent |") == 1
    assert text.count("`bloom` |") == 1
    capsys.readouterr()
    page.write_text("no marks", encoding="utf-8")
    assert BEGIN in refused(capsys, "--md", str(page))


def test_mistakes_name_the_way_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean" in refused(capsys, "--type", "qwen33")
    assert "leave --type" in refused(capsys, "llama", "--type", "llama")
    assert "tables of all types" in refused(capsys, "llama", "--md", str(tmp_path / "page.md"))


@pytest.mark.parametrize("name", ["./nosuchfolder", "~/nosuchfolder", "/no/such", "a/b/c", "a/b/"])
def test_a_path_that_leads_nowhere_is_not_asked_of_the_hub(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"there is no folder '{name}'" in refused(capsys, name)


def test_a_folder_in_a_place_of_its_own_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaConfig().save_pretrained(tmp_path / "a" / "b" / "c")
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c", "./a/b/c", "a/b/c/"):
        assert main(["models", name]) == 0
        assert "llama" in capsys.readouterr().out


def test_a_type_whose_trial_failed_is_wrong_and_one_without_trial_is_not_tried() -> None:
    served = ModelType("new", "new", layers={"full": 2}, kv_heads=2, key_dim=8)
    trials = {"new": Trial("differs", "logits differ", {"flat": "logits differ"})}
    record = Record(trials, {"new": Setup.present()})
    (row,) = make_rows([served], record)
    assert row.verdict == "wrong" and row.without == ["flat"]
    assert "logits differ" in details(row, record)
    assert Row(served, None).verdict == Row(served, Trial("not tried")).verdict == "not tried"
    assert Row(served, Trial("equal", part="text part")).verdict == "text part"
    assert lines([Row(served, None)], 80)[1] == "new  not tried   2/2"


def test_stale_trials_are_named_with_what_they_were_made_with(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    present = Setup.present()
    trials = dict.fromkeys(("gemma3", "gpt2", "jamba", "bloom"), Trial("equal"))
    setups = dict.fromkeys(trials, present)
    monkeypatch.setattr(command.Record, "read", lambda: Record(trials, setups))
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}", encoding="utf-8")

    def shown(*words: str) -> tuple[str, str]:
        assert main(["models", *words]) == 0
        return capsys.readouterr()

    shown("--md", str(page))
    assert "another state" not in shown()[1] + page.read_text(encoding="utf-8")
    setups["gpt2"] = replace(present, code="0123")
    # A type that is refused now has no trial on the page.
    setups["bloom"] = replace(present, code="4567")
    note = (
        "gpt2 was tried with another state of the code or of transformers: with transformers "
        f"{present.transformers} and state 0123 of the code. `hf-kvret models --try FILE` tries"
    )
    assert note in shown()[1]
    shown("--md", str(page))
    assert note in page.read_text(encoding="utf-8")
    setups["jamba"] = replace(present, transformers="4.0.0")
    assert "2 types were tried with another state" in shown()[1]
    stale = [row["type"] for row in json.loads(shown("--json")[0]) if row["stale"]]
    assert stale == ["gpt2", "jamba"]
    one = " ".join(shown("--type", "gpt2")[0].split())
    assert "state 0123 of the code, not the present ones" in one
    assert "not the present ones" not in shown("--type", "gemma3")[0]


def test_try_makes_stale_trials_again_and_goes_on_with_another_transformers(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old = tmp_path / "trials.json", replace(Setup.present(), transformers="4.0.0")
    Record({"gemma3": Trial("raised", "an old fault")}, {"gemma3": old}).write(path)
    monkeypatch.setattr(record_module, "trial", lambda name: Trial("equal"))
    assert main(["models", "--try", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "gemma3: equal" in out + err and "another state" not in err
    kept = Record.read(path)
    assert list(kept.trials) == ["gemma3", "gpt2", "jamba"]
    assert set(kept.setups.values()) == {Setup.present()}


def test_write_page_raises_before_it_writes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{END} {BEGIN}", encoding="utf-8")
    with pytest.raises(ValueError, match="no place for the table"):
        write_page(page, "text")
    assert page.read_text(encoding="utf-8") == f"{END} {BEGIN}"
