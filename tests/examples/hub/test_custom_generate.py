"""``generate(..., custom_generate=FOLDER)`` decodes with a retrieval cache, from the hub too."""

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    dynamic_module_utils as modules,
)

import hf_kvret
from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.models.versions import CACHE_NAME
from hf_kvret.testing.scenario import prompt

from ...docs.pages import DOCS, ROOT

FOLDER = ROOT / "examples" / "hub" / "generate"
REPO = "alice/paris"
OPTIONS = {"top_k": 8, "sink": 2, "recent": 4, "flush": 4, "dense_below": 0}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 2},
    "output": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.fixture(autouse=True)
def copied_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers copies the file that it imports; here not to the user's cache."""
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def files() -> dict[str, bytes]:
    """Those of the folder, as a repository has them."""
    paths = [path for path in FOLDER.rglob("*") if path.suffix in (".py", ".txt", ".md")]
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}


def run(model: PreTrainedModel, folder: str | Path = FOLDER, **options: Any) -> Any:
    """Eight tokens after a prompt of two sequences, decoded by the folder."""
    torch.manual_seed(0)
    named = {"custom_generate": str(folder), "trust_remote_code": True}
    return model.generate(prompt(2, 60), max_new_tokens=8, **{**named, **options})


def by_name(model: PreTrainedModel, name: str = "paris", **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(prompt(2, 60), max_new_tokens=8, cache_implementation=name, **options)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_method_by_name(llama: PreTrainedModel, mode: str) -> None:
    options = {**MODES[mode], "cache_config": OPTIONS}
    result, expected = run(llama, **options), by_name(llama, **options)
    if mode == "output":
        assert isinstance(result[CACHE_NAME], hf_kvret.ParisKVCache)
        assert all(map(torch.equal, result.scores, expected.scores))
        result, expected = result.sequences, expected.sequences
    assert torch.equal(result, expected)
    assert mode != "greedy" or not torch.equal(result, by_name(llama, "dynamic", **MODES[mode]))


def test_another_method_is_a_keyword_or_a_config(llama: PreTrainedModel) -> None:
    output = {**MODES["output"], "cache_config": OPTIONS}
    config = GenerationConfig(cache_implementation="flat", **output)
    for options in ({"cache_implementation": "flat", **output}, {"generation_config": config}):
        assert type(run(llama, **options)[CACHE_NAME]) is hf_kvret.FlatKVCache


def test_a_cache_that_is_given_is_used(llama: PreTrainedModel) -> None:
    cache = hf_kvret.FlatKVCache(llama.config, **OPTIONS)
    run(llama, **{CACHE_NAME: cache}, **MODES["greedy"])
    assert cache.get_seq_length() == 67


def test_it_comes_from_the_hub_at_a_revision(llama: PreTrainedModel, hub: Any) -> None:
    hub.add(REPO, files())
    hub.add(REPO, {"custom_generate/generate.py": b"raise SystemExit"}, ref="other")
    options = {**MODES["greedy"], "cache_config": OPTIONS}
    result = run(llama, REPO, revision="main", **options)
    assert torch.equal(result, by_name(llama, **options))
    assert sum("generate.py" in line for line in hub.bodies()) == 1


def test_a_model_with_the_folder_decodes_so_by_default(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    llama.save_pretrained(tmp_path / "model")
    for name, content in files().items():
        path = tmp_path / "model" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    output = {**MODES["output"], "cache_config": OPTIONS, "max_new_tokens": 8}
    result = model.generate(prompt(2, 60), **output)
    assert isinstance(result[CACHE_NAME], hf_kvret.ParisKVCache)
    assert torch.equal(result.sequences, by_name(llama, **MODES["greedy"], cache_config=OPTIONS))


def test_without_the_package_the_message_says_how_to_install_it(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if name == "hf_kvret":
            raise ModuleNotFoundError("No module named 'hf_kvret'", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"not installed.*: in a checkout .* pip install -c"):
        run(llama, **MODES["greedy"])


def example(words: str) -> str:
    """The Python block of docs/hub.md with these words; one is in a block of Markdown."""
    page = (DOCS / "hub.md").read_text(encoding="utf-8")
    [block] = [
        text for text in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M) if words in text
    ]
    return block


def test_the_section_for_a_card_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = example("AutoTokenizer").replace("NAME/MODEL", str(REFERENCE_MODEL))
    exec(code.replace("=100", "=4"), {"long_text": "a b c " * 50})
    assert capsys.readouterr().out


def test_the_example_of_the_page_runs(llama: PreTrainedModel, hub: Any) -> None:
    hub.add("NAME/paris", files())
    exec(example("custom_generate"), {"model": llama, "inputs": {"input_ids": prompt(1, 60)}})
    assert any("generate.py" in line for line in hub.bodies())
