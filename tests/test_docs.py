"""The documentation is true: its code runs, and names and commands in it are there.

A block of Python runs in the namespace of its page, in order. Pages may use ``model`` and
``inputs`` without making them, as if they were the reader's own, but for those that promise to be
whole. A block that does not run (``pages.py`` tells which) is parsed, and its names of ours are
looked up. By default run the pages that a newcomer meets; `.ci/docs` runs all.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvret
from hf_kvret.cli import main
from hf_kvret.lab.calibrate.tiny import tiny_artifact

from .pages import DOCS, PAGES, README, ROOT, blocks, name, prose, table

FIRST_STEPS = DOCS / "tutorials" / "first-steps.md"
# Runs in tests/lab/calibrate/test_tutorial_calibration.py, where there is a hub.
SHARING = DOCS / "tutorials" / "calibrate-share-load.md"
# They begin with what their blocks need.
WHOLE = tuple(
    DOCS / f"{page}.md"
    for page in (
        "options",
        "models",
        "choose",
        "quickstart",
        "recipes",
        "migrate",
        "memory",
        "multi-gpu",
        "faq",
    )
)
# Their blocks run by default.
NEWCOMERS = (README, DOCS / "quickstart.md", DOCS / "choose.md")


def pages_with_code() -> Iterator[Any]:
    """All but the tutorials, which have tests of their own; most of them are slow together."""
    for page in PAGES:
        if page in (FIRST_STEPS, SHARING) or all(one.language != "python" for one in blocks(page)):
            continue
        marks = () if page in NEWCOMERS else pytest.mark.slow
        yield pytest.param(page, id=name(page), marks=marks)


def unknown_names(code: str) -> list[str]:
    """Names that a block takes from our packages and that are not there."""
    unknown = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_kvret"):
            module = importlib.import_module(node.module)
            wanted = [(module, one.name) for one in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hf_kvret":
            wanted = [(hf_kvret, node.attr)]
        else:
            continue
        unknown += [f"{one.__name__}.{attr}" for one, attr in wanted if not hasattr(one, attr)]
    return unknown


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama; every page loads its own, because pages change it."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def namespace(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """What a page starts with, in an empty directory; registration is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    # Longer than the default `dense_below`, so that the pages' caches have cold tokens.
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 128, (1, 3000), generator=generator)
    yield {
        "__name__": "page",
        "model": model,
        "inputs": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
    }
    hf_kvret.unregister()
    hf_kvret.register()


def run(page: Path, namespace: dict[str, Any]) -> int:
    """Run the page's blocks; returns how many ran. A failing line is shown with its number."""
    count = 0
    for block in blocks(page):
        if block.language != "python":
            continue
        source = "\n" * (block.line - 1) + block.text
        code = compile(source, str(page), "exec")
        if block.runs:
            exec(code, namespace)
            count += 1
    return count


def test_the_parser_finds_blocks_and_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| a | b |\n|---|---|\n| `x` | 1 |\n\n```python\ny = 1\n```\n\n"
        "<!-- not run: why -->\n```python\nz = 1\n```\n```bash\nls\n```\n"
    )
    found = list(blocks(page))
    assert [(one.language, one.line, one.runs) for one in found] == [
        ("python", 6, True),
        ("python", 11, False),
        ("bash", 14, True),
    ]
    assert table(page, "a") == [["`x`", "1"]]
    assert table(page, "b") == []
    made: dict[str, Any] = {}
    assert run(page, made) == 1
    assert made["y"] == 1
    assert "z" not in made


@pytest.mark.parametrize("page", pages_with_code())
def test_the_code_of_a_page_runs(page: Path, namespace: dict[str, Any]) -> None:
    if page in WHOLE:
        del namespace["model"], namespace["inputs"]
    ran = run(page, namespace)
    marked_alone = (README, DOCS / "index.md")
    assert ran or page in marked_alone, "every block is marked as not run"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_that_do_not_run_are_python_with_names_that_are_there(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python" and not block.runs:
            assert not unknown_names(block.text), f"the block at line {block.line}"


def test_a_name_that_is_not_there_is_noticed() -> None:
    code = "from hf_kvret.testing import MODELS, NONE\nhf_kvret.attach(m)\nhf_kvret.Nothing()"
    assert unknown_names(code) == ["hf_kvret.testing.NONE", "hf_kvret.Nothing"]


def test_the_first_steps_get_their_answers(namespace: dict[str, Any]) -> None:
    run(FIRST_STEPS, namespace)
    # With full attention the bundled model answers nearly all, by guessing it would answer none.
    assert namespace["right"] >= 0.9 * len(namespace["questions"])
    layers = namespace["fork"].stats()["layers"]
    assert all(layer["selected"] > 0 for layer in layers)


def test_concepts_name_the_counts_and_bytes_of_the_code(
    namespace: dict[str, Any], tmp_path: Path
) -> None:
    counted: set[str] = set()
    options = {"top_k": 8, "track_recall": True}
    for method, cls in hf_kvret.registered_methods().items():
        # The model has no latent attention, which is all that "latent" is for.
        if not cls.Config.retrieves:
            continue
        model, learned = namespace["model"], {}
        if cls.needs_artifact:
            learned = {"artifact": tiny_artifact(model, method, tmp_path / method)}
        # AQUA-KV, which attends to everything, has no slots.
        slots = {} if method == "aqua" else {"store": "resident"}
        cache = cls(model.config, **options, **slots, **learned)
        namespace["model"].generate(
            **namespace["inputs"], past_key_values=cache, max_new_tokens=2, do_sample=False
        )
        counted |= set(cache.stats()["layers"][0])
    told = re.findall(r"^\| (`[\w`, ]+`) \|", prose(DOCS / "concepts.md"), flags=re.MULTILINE)
    names = {word for cell in told for word in re.findall(r"\w+", cell)}
    report = cache.memory()
    parts = {member for member, _ in inspect.getmembers(report) if not member.startswith("_")}
    assert names == counted | parts


def test_nobody_is_sent_to_pypi_where_the_package_is_not() -> None:
    """The checkout is installed: ``pip install -c constraints.txt ".[eval]"``."""
    places = ("hf_kvret", "kernels", "model_patches", "tests", "examples", "docs")
    files = [file for place in places for file in (ROOT / place).rglob("*.*")]
    wrong = re.compile(r"pip install[^\n&]*\bhf[-_]kvret\b|hf[-_]kvret\[[a-z]")
    sent = [
        name(file)
        for file in [*files, README, ROOT / "CONTRIBUTING.md"]
        if file.suffix in (".md", ".py") and wrong.search(file.read_text(encoding="utf-8"))
    ]
    assert not sent


PLACEHOLDER = re.compile(
    r"^[A-Z][A-Z_]{2,}$"  # a word in capitals alone on a line
    r"|\b(?:TODO|TBD|FIXME|XXX|PLACEHOLDER)\b(?! without)"
    r"|(?<=\|) *(?:[A-Z?]|TK|N/N) *(?=\|)",  # a capital alone in a cell
    flags=re.MULTILINE,
)


def placeholders(text: str) -> list[str]:
    """What a page waits to have filled in; the first row of a table may have letters alone."""
    body = re.sub(r"^\|.*\n(?=\|[-:| ]+\|$)", "", text, flags=re.MULTILINE)
    return [one[0].strip() for one in PLACEHOLDER.finditer(body)]


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / f"{one}.md" for one in ("CHANGELOG", "CONTRIBUTING"))], ids=name
)
def test_no_page_has_a_placeholder(page: Path) -> None:
    assert not placeholders(prose(page))


def test_placeholders_are_noticed() -> None:
    table_of = "| W | L |\n|---|---|\n| {} | 1 |\n"
    assert placeholders("Text.\nEXTRAS\n\n" + table_of.format("S")) == ["EXTRAS", "S"]
    assert placeholders("It takes TBD seconds.") == ["TBD"]
    assert placeholders("H2O is a README word.\n" + table_of.format("no")) == []


def test_the_commands_of_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    offered = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    for page in PAGES:
        for call in re.findall(r"hf-kvret demo[^\n`]*", page.read_text(encoding="utf-8")):
            flags = set(re.findall(r"--[\w-]+", call))
            assert flags <= offered, f"{name(page)}: {call}"
    for page in PAGES:
        for script in re.findall(r"python (examples/\S+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{name(page)}: {script}"
