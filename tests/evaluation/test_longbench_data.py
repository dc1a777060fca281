"""LongBench's files are read, and prompts are filled and cut as LongBench does it."""

from __future__ import annotations

import json
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.evaluation.longbench import (
    LONG_TASKS,
    PROMPTS,
    LongData,
    LongSample,
    download,
    fill,
    read_prompts,
    split_template,
)
from hf_kvret.evaluation.texts import chat_parts, token_ids

# Of the templates in LongBench/config/dataset2prompt.json at 2e00731.
DIGESTS = {
    "narrativeqa": "aada7ed24b06",
    "qasper": "0fbdd123fe7f",
    "multifieldqa_en": "20b4666a2de8",
    "hotpotqa": "9ec4ae308865",
    "2wikimqa": "9ec4ae308865",
    "musique": "9ec4ae308865",
    "gov_report": "91c25d585b18",
    "qmsum": "dca23b678fe0",
    "multi_news": "2af3f28c40b9",
    "trec": "0eff8bebdba9",
    "triviaqa": "00a802e6377e",
    "samsum": "a68d88423490",
    "passage_count": "986550b6c610",
    "passage_retrieval_en": "39b96b7fa52b",
    "lcc": "6a1f24cf0bb8",
    "repobench-p": "ee9ec182ea5f",
}
LINE: dict[str, Any] = {
    "context": "The {grass} is green.",
    "input": "What is green?",
    "answers": ["grass"],
    "length": 4,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}
SAMPLE = LongSample("The {grass} is green.", "What is green?", ("grass",), 4, ())


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_prompts_are_quoted_word_for_word() -> None:
    digests = {task: sha256(text.encode()).hexdigest()[:12] for task, text in PROMPTS.items()}
    assert digests == DIGESTS
    assert list(PROMPTS) == list(LONG_TASKS)


def test_a_folder_and_a_zip_give_the_same_samples(tmp_path: Path) -> None:
    text = json.dumps(LINE) + "\n\n" + json.dumps(LINE | {"input": "é\u2028", "length": 9000})
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "qasper.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "unpacked" / "data").mkdir(parents=True)
    (tmp_path / "unpacked" / "data" / "qasper.jsonl").write_text(text, encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", text)
        archive.writestr("data/qasper_e.jsonl", json.dumps(LINE | {"input": "even"}))
    plain, unpacked, zipped = (
        LongData(tmp_path / name) for name in ("plain", "unpacked", "data.zip")
    )
    found = plain.read("qasper")
    assert found == unpacked.read("qasper") == zipped.read("qasper")
    assert found[0] == SAMPLE and (found[1].input, found[1].length) == ("é\u2028", 9000)
    assert plain.read("qasper", 1) == found[:1]
    assert plain.fingerprint("qasper") == zipped.fingerprint("qasper")
    assert plain.fingerprint("trec") is None
    assert [sample.input for sample in LongData(tmp_path / "data.zip", True).read("qasper")] == [
        "even"
    ]


def test_a_changed_file_has_another_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "qasper.jsonl"
    file.write_text(json.dumps(LINE))
    first = LongData(tmp_path).fingerprint("qasper")
    file.write_text(json.dumps(LINE | {"answers": ["sky"]}))
    assert first is not None and first.startswith("qasper.jsonl ")
    assert LongData(tmp_path).fingerprint("qasper") != first


def test_bad_data_is_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Give LongBench's data\.zip"):
        LongData(tmp_path / "none")
    file = tmp_path / "qasper.jsonl"
    file.write_text("")
    data = LongData(tmp_path)
    with pytest.raises(ValueError, match=r"neither a folder nor a \.zip"):
        LongData(file)
    with pytest.raises(ValueError, match="has no samples"):
        data.read("qasper")
    with pytest.raises(FileNotFoundError, match=r"has no trec\.jsonl: leave trec out"):
        data.read("trec")
    for bad, message in (
        ("{", "line 2: not JSON"),
        ("[]", "line 2: no JSON object"),
        (json.dumps(LINE | {"answers": []}), "line 2: answers missing"),
        (json.dumps(LINE | {"context": 3, "length": "4"}), "line 2: context, length missing"),
        (json.dumps(LINE | {"all_classes": "x"}), "line 2: all_classes missing"),
    ):
        file.write_text(json.dumps(LINE) + "\n" + bad)
        with pytest.raises(ValueError, match=message):
            data.read("qasper")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        data.read("qasper")


def test_a_hub_that_is_out_of_reach_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"nobody/nothing-here.*give --data PATH"):
        download("nobody/nothing-here")
    with pytest.raises(ValueError, match=r"a b.*give --data PATH"):
        download("a b")


def test_short_prompts_are_filled_and_not_touched(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "Read {context}\nQ: {input}\nA:"
    inside = fill(template, SAMPLE, tokenizer, 1000, inside=True)
    assert inside.context == "Read The {grass} is green.\nQ: What is green?\nA:"
    assert (inside.question, inside.cut) == ("", False)
    after = fill(template, SAMPLE, tokenizer, 1000, inside=False)
    assert (after.context, after.question) == (
        "Read The {grass} is green.",
        "\nQ: What is green?\nA:",
    )


def test_long_prompts_lose_their_middle_in_both_set_ups(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    context = " ".join(f"word{number}" for number in range(200))
    sample = LongSample(context, "What is it?", ("x",), 200, ())
    template = "Read: {context}\nQuestion: {input}\nAnswer:"
    text = template.format(context=context, input=sample.input)
    ids = token_ids(tokenizer, text).tolist()
    for limit in (101, 100, len(ids) - 1):
        half = limit // 2
        wanted = tokenizer.decode(ids[1:half]) + tokenizer.decode(ids[-half:])
        inside = fill(template, sample, tokenizer, limit, inside=True)
        assert inside.cut and inside.context == wanted
        after = fill(template, sample, tokenizer, limit, inside=False)
        assert after.cut and after.context + after.question == wanted
        assert after.question == "\nQuestion: What is it?\nAnswer:"
    assert not fill(template, sample, tokenizer, len(ids), inside=True).cut
    with pytest.raises(ValueError, match=r"a question has .* tokens"):
        fill(template, sample, tokenizer, 20, inside=False)


def test_a_chat_template_surrounds_the_prompt_and_strips_nothing(
    tokenizer: PreTrainedTokenizerBase, tiny_model_dir: Path
) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        chat_parts(tokenizer)
    chatty = AutoTokenizer.from_pretrained(tiny_model_dir)
    chatty.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    chat = chat_parts(chatty)
    assert chat == ("[", "]>")
    template = "{context}\n{input} "
    inside = fill(template, SAMPLE, chatty, 1000, inside=True, chat=chat)
    assert inside.context == "[The {grass} is green.\nWhat is green? ]>"
    after = fill(template, SAMPLE, chatty, 1000, inside=False, chat=chat)
    assert (after.context, after.question) == ("[The {grass} is green.", "\nWhat is green? ]>")
    chatty.chat_template = "nothing"
    with pytest.raises(ValueError, match="doesn't show a message"):
        chat_parts(chatty)


def test_templates_of_the_user_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_prompts(file)
    for content, message in (
        ("{", "not JSON"),
        ("[1]", "JSON object of templates"),
        ('{"qasper": "no field"}', r"write \{context\} exactly once"),
        ('{"qasper": "{context} {context} x"}', "exactly once"),
        ('{"qasper": "{context} {question}"}', "unknown field 'question'"),
        ('{"qasper": "{context} {"}', "no template"),
        ('{"qasper": "{input} {context}"}', "something must follow"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_prompts(file)
    file.write_text('{"qasper": "{{}} {context}: {input}", "dureader": "{other}"}')
    prompts = read_prompts(file)
    assert split_template(prompts["qasper"]) == ("{{}} {context}", ": {input}")
