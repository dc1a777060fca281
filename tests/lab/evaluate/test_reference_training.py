"""The training scripts of the reference models: documents, designed starts, going on."""

from __future__ import annotations

import argparse
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvret.models.compatibility import check_config, head_dims

EXAMPLES = Path(__file__).parents[3] / "examples"


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


def _check_start(model: Any, heads: int) -> None:
    """Two heads look one and two tokens back, and ``heads`` behind them at what came after."""
    model.eval().set_attn_implementation("eager")
    half = torch.randint(3, 400, (60,))
    with torch.no_grad():
        attentions = model(torch.cat([half, half])[None], output_attentions=True).attentions
    index = torch.arange(62, 119)
    for back in (1, 2):
        assert attentions[0][0, back - 1, index, index - back].mean() > 0.8
    for head in range(heads):
        # By chance it would be one part in a hundred.
        assert attentions[1][0, head, index, index - 59].mean() > 0.4


def test_the_start_copies_what_came_after_the_same_two_tokens(
    scripts: Any, tiny_model_dir: Path
) -> None:
    torch.manual_seed(0)
    _check_start(scripts.build_model(AutoTokenizer.from_pretrained(tiny_model_dir)), heads=1)


def test_heads_that_share_a_latent_start_so_too(scripts: Any, tiny_model_dir: Path) -> None:
    import train_latent_model

    torch.manual_seed(0)
    model = train_latent_model.build_latent_model(AutoTokenizer.from_pretrained(tiny_model_dir))
    assert model.config.num_attention_heads == 16
    _check_start(model, heads=2)
    check_config(model.config)
    assert head_dims(model.config) == [160]


def test_every_weight_of_the_latent_model_learns_in_its_way(
    scripts: Any, tiny_model_dir: Path, tiny_text: Path
) -> None:
    import train_latent_model
    import training_loop

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = train_latent_model.build_latent_model(tokenizer).train()
    muon, adam = training_loop.make_optimizers(model, 8e-3)
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = [names.pop(id(w)) for o in (muon, adam) for g in o.param_groups for w in g["params"]]
    assert not names and len(groups) == len(set(groups))
    assert all("mlp" in names_of for names_of in groups[: 3 * train_latent_model.LAYERS])
    text = tokenizer(tiny_text.read_text(), add_special_tokens=False)["input_ids"]
    batches = scripts.Batches(tokenizer, {"standardebooks": np.array(text, dtype=np.uint16)}, 0)
    # One document of eight: the matrix products in bfloat16 are slow.
    batch = [tensor[:1] for tensor in batches.documents(0)]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    first, _, right = training_loop.losses(model, *batch)
    first.backward()
    assert right is not None
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            # As warming up begins.
            group["lr"] /= group["warm_up"]
            # One step of Muon's iteration in place of five: bfloat16 is slow here.
            if "ns_steps" in group:
                group["ns_steps"] = 1
        optimizer.step()
    assert training_loop.losses(model, *batch)[0] < first
    still = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert not still


@pytest.fixture
def books(scripts: Any, tiny_model_dir: Path, tiny_text: Path) -> tuple[Any, Any, np.ndarray]:
    """The script of the books model, a tokenizer, and some text."""
    import train_books_model

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = tokenizer(tiny_text.read_text(), add_special_tokens=False)["input_ids"]
    return train_books_model, tokenizer, np.array(text, dtype=np.uint16)


def test_rows_of_books_grow_and_every_piece_is_read_once(
    books: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, tokenizer, _ = books
    stages = zip((0, 11 * 4096 - 1000, 15 * 4096), (4, 1, 1), (512, 2048, 4096), strict=True)
    monkeypatch.setattr(script, "STAGES", tuple(stages))
    text = np.arange(20 * script.LONGEST + 7, dtype=np.uint32)
    draws = script.Books(tokenizer, {"a": text[:1000], "b": text[1000:]}, 0)
    rows = []
    while draws.next < len(draws.text):
        tokens, positions, answers = draws.draw(None)
        assert tokens.shape == positions.shape == answers.shape and not answers.any()
        assert (tokens.diff() == 1).all() and (positions == torch.arange(tokens.shape[1])).all()
        rows.append(tokens)
    assert [tokens.shape[1] for tokens in rows] == [512] * 22 + [2048] * 8 + [4096] * 5
    read = torch.cat([tokens.flatten() for tokens in rows])
    assert not torch.equal(read, read.sort().values)
    assert read.sort().values.tolist() == list(range(20 * script.LONGEST))
    # Text that is all read comes again, in the longest rows.
    assert torch.equal(draws.draw(None)[0].flatten(), read[:4096])
    again = script.Books(tokenizer, {"a": text}, 0)
    again.load_state_dict({"next": 4 * script.LONGEST})
    assert torch.equal(again.draw(None)[0].flatten(), read[4 * script.LONGEST :][:2048])
    with pytest.raises(ValueError, match="4096 are needed"):
        script.Books(tokenizer, {"a": text[:4095]}, 0)


def test_unread_text_is_what_the_others_did_not_read(
    scripts: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from reference_data import encode_texts

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with lzma.open(tmp_path / "a.jsonl.xz", "wt", encoding="utf-8") as file:
        for number in range(40):
            file.write(json.dumps({"split": "train", "text": f"{number} " * 50}) + "\n")
    size = len(tokenizer("0 " * 50)["input_ids"])
    read, unread = (
        encode_texts(tmp_path, tokenizer, "train", 15 * size, 0, {"a": 1.0}, last)["a"]
        for last in (False, True)
    )

    def documents(tokens: np.ndarray) -> set[str]:
        return {text.split()[0] for text in tokenizer.decode(tokens).split("<s>") if text.split()}

    assert len(documents(read)) > 5 and len(documents(unread)) > 5
    assert not documents(read) & documents(unread)


def test_an_interrupted_run_ends_with_the_same_weights(
    books: tuple[Any, ...], tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller model: ``learn`` makes the checkpoints, whatever it trains."""
    import training_loop

    script, tokenizer, text = books
    monkeypatch.setattr(script, "LONGEST", 64)
    monkeypatch.setattr(script, "STAGES", ((0, 2, 32), (3 * 64, 1, 64)))
    monkeypatch.setattr(training_loop, "CHECKPOINT_EVERY", 2)
    recipe = training_loop.Recipe(script.build_books_model, script.Books, muon=script.MUON)
    args = argparse.Namespace(tokens=6 * 64, lr=2e-2, seed=0)

    def run(checkpoint: str, breaks_at: int | None = None) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).train()
        draws = script.Books(tokenizer, {"a": text[: 64 * 8]}, 0)
        draw = draws.draw

        def interrupted(stage: int | None) -> Any:
            if draws.next == breaks_at:
                raise KeyboardInterrupt
            return draw(stage)

        draws.draw = interrupted
        progress = training_loop.learn(model, draws, args, tmp_path / checkpoint, recipe)
        assert progress.tokens == args.tokens and progress.steps == 6
        return model.state_dict()

    whole = run("whole.pt")
    with pytest.raises(KeyboardInterrupt):
        run("broken.pt", breaks_at=3 * 64)
    resumed = run("broken.pt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    args.lr = 1e-2
    with pytest.raises(ValueError, match="give the same options"):
        run("broken.pt")


def test_books_are_learnt_by_muon_but_for_embeddings_and_norms(books: tuple[Any, ...]) -> None:
    import training_loop

    script, tokenizer, _ = books
    model = script.build_books_model(tokenizer)
    optimizers = training_loop.make_optimizers(model, 2e-2, script.MUON, 4e-3)
    names = {id(weight): name for name, weight in model.named_parameters()}
    muon, embeddings, others = (
        {names.pop(id(weight)) for weight in group["params"]}
        for optimizer in optimizers
        for group in optimizer.param_groups
    )
    assert not names and len(muon) == 7 * model.config.num_hidden_layers
    assert not any("norm" in name for name in muon)
    assert {name for name in embeddings if "norm" not in name} == {"model.embed_tokens.weight"}
    assert others == {name for name in others if "norm" in name}
    assert optimizers[1].param_groups[0]["highest"] == 4e-3


def _run(script: str, folder: Path, data: Path, tokens: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), "--data", str(data)]
    done = subprocess.run(
        [*command, "--out", str(folder), "--tokens", tokens], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["train_reference_model.py", "train_latent_model.py", "train_books_model.py"]
)
def test_a_short_run_writes_a_model_and_says_what_it_did(
    script: str, tmp_path: Path, scripts: Any
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), 4)) for _ in range(500)]
    for source in scripts.NeedleRows.__init__.__globals__["SOURCES"]:
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
