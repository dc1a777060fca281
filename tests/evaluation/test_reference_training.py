"""The training scripts of the reference models: documents, designed starts, going on."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_kvret.integration.compatibility import check_config, head_dims

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the examples, which import each other by plain names."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_reference_model

    return train_reference_model


@pytest.mark.parametrize("length", [512, 900])
def test_answers_are_in_the_document_before_their_question(
    length: int, scripts: Any, tiny_model_dir: Path, tiny_text: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokens = tokenizer(tiny_text.read_text(), add_special_tokens=False)["input_ids"]
    rows = scripts.NeedleRows(tokenizer, {"standardebooks": np.array(tokens, dtype=np.uint16)}, 0)
    answered = 0
    for _ in range(20):
        row = rows.row(length, 3)
        assert len(row.tokens) == len(row.is_answer) == length
        assert (np.diff(row.boundaries) > 0).all()
        assert row.boundaries[0] > 0 and row.boundaries[-1] < length
        starts = np.flatnonzero(np.diff(row.is_answer.astype(int)) == 1) + 1
        for start in starts:
            end = (
                start + int(np.argmin(row.is_answer[start:]))
                if not row.is_answer[start:].all()
                else length
            )
            answer = tokenizer.decode(row.tokens[start:end]).strip().rstrip(".")
            value = answer.split()[-1]
            assert value in tokenizer.decode(row.tokens[:start]), answer
            answered += 1
    assert answered >= 20


def test_the_start_copies_what_came_after_the_same_two_tokens(
    scripts: Any, tiny_model_dir: Path
) -> None:
    torch.manual_seed(0)
    model = scripts.build_model(AutoTokenizer.from_pretrained(tiny_model_dir)).eval()
    model.set_attn_implementation("eager")
    half = torch.randint(3, 400, (60,))
    tokens = torch.cat([half, half])[None]
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True).attentions
    place = torch.arange(62, 119)
    assert attentions[0][0, 0, place, place - 1].mean() > 0.8
    assert attentions[0][0, 1, place, place - 2].mean() > 0.8
    induction = attentions[1][0, 0, place, place - 59]
    # By chance it would be one part in a hundred.
    assert induction.mean() > 0.4


def test_heads_that_share_a_latent_start_so_too(scripts: Any, tiny_model_dir: Path) -> None:
    import latent_start

    torch.manual_seed(0)
    model = latent_start.build_latent_model(AutoTokenizer.from_pretrained(tiny_model_dir)).eval()
    model.set_attn_implementation("eager")
    half = torch.randint(3, 400, (60,))
    tokens = torch.cat([half, half])[None]
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True).attentions
    place = torch.arange(62, 119)
    assert attentions[0].shape[1] == 16
    assert attentions[0][0, 0, place, place - 1].mean() > 0.8
    assert attentions[0][0, 1, place, place - 2].mean() > 0.8
    for head in (0, 1):
        assert attentions[1][0, head, place, place - 59].mean() > 0.4
    check_config(model.config)
    assert head_dims(model.config) == [160]


def test_every_weight_of_the_latent_model_learns_in_its_way(
    scripts: Any, tiny_model_dir: Path, tiny_text: Path
) -> None:
    import latent_start

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = latent_start.build_latent_model(tokenizer).train()
    muon, adam = scripts.make_optimizers(model, 8e-3)
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = [names.pop(id(w)) for o in (muon, adam) for g in o.param_groups for w in g["params"]]
    assert not names and len(groups) == len(set(groups))
    assert all("mlp" in names_of for names_of in groups[: 3 * latent_start.LAYERS])
    text = tokenizer(tiny_text.read_text(), add_special_tokens=False)["input_ids"]
    batches = scripts.Batches(tokenizer, {"standardebooks": np.array(text, dtype=np.uint16)}, 0)
    batch = batches.documents(0)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    first, _, right = scripts.losses(model, *batch)
    first.backward()
    assert right is not None
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            # As warming up begins.
            group["lr"] /= group["warm_up"]
        optimizer.step()
    assert scripts.losses(model, *batch)[0] < first
    still = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert not still


def _run(script: str, folder: Path, data: Path, tokens: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), "--data", str(data)]
    done = subprocess.run(
        [*command, "--out", str(folder), "--tokens", tokens], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_reference_model.py", "train_latent_model.py"])
def test_a_short_run_writes_a_model_and_says_what_it_did(
    script: str, tmp_path: Path, scripts: Any
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), 4)) for _ in range(500)]
    for source in scripts.encode_texts.__globals__["SOURCES"]:
        with lzma.open(data / f"{source}.jsonl.xz", "wt", encoding="utf-8") as file:
            for number in range(60):
                text = ". ".join(" ".join(rng.choice(words, 12)) for _ in range(60)) + "."
                split = "val" if number == 0 else "train"
                file.write(json.dumps({"split": split, "text": text}) + "\n")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        report = json.loads(_run(script, folder, data, "1e4"))
        assert report["tokens"] >= 10_000 and not (folder / "checkpoint.pt").exists()
    weights = [load_file(folder / "model.safetensors") for folder in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    missing = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert missing.returncode != 0 and "--data must hold" in missing.stderr
