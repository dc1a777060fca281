"""The documentation is true: code runs, names, commands and links are there, tables are the code's.

A block of Python runs in the namespace of its page, in order. Pages may use ``model`` and
``inputs`` without making them, as if they were the reader's own, but for those that promise to be
whole. A block that does not run (``pages.py`` tells which) is parsed, and its names of ours are
looked up. By default run the pages that a newcomer meets; `.ci/docs` runs all.
"""

import ast
import importlib
import inspect
import json
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
from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.lab.evaluate.demo import Demo
from hf_kvret.lab.report.results import Results
from hf_kvret.methods.paris.index import SCHEDULES
from hf_kvret.testing import MODELS

from .pages import DOCS, PAGES, README, ROOT, blocks, name, prose, table

FIRST_STEPS = DOCS / "tutorials" / "first-steps.md"
# Run with their commands in test_tutorials.py and in tests/examples/hub, where there is a hub.
ELSEWHERE = (
    FIRST_STEPS,
    *(DOCS / "tutorials" / f"{page}.md" for page in ("calibrate-share-load", "two-bits")),
    DOCS / "tutorials" / "ask-a-long-text.md",
    DOCS / "hub.md",
)
# They begin with what their blocks need.
WHOLE = tuple(
    DOCS / f"{page}.md"
    for page in (
        *("options", "models", "choose", "quickstart", "recipes", "migrate", "multi-gpu"),
        "troubleshooting",
    )
)
# Their blocks run by default.
NEWCOMERS = (README, DOCS / "quickstart.md")


def pages_with_code() -> Iterator[Any]:
    """All but the tutorials, which have tests of their own; most of them are slow together."""
    for page in PAGES:
        if page in ELSEWHERE or all(one.language != "python" for one in blocks(page)):
            continue
        marks = () if page in NEWCOMERS else pytest.mark.slow
        yield pytest.param(page, id=name(page), marks=marks)


def unknown_names(code: str) -> list[str]:
    """Names that a block takes from our packages and that are not there."""
    unknown = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_kvret"):
            module = importlib.import_module(node.module)
            pairs = [(module, one.name) for one in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hf_kvret":
            pairs = [(hf_kvret, node.attr)]
        else:
            continue
        unknown += [f"{one.__name__}.{attr}" for one, attr in pairs if not hasattr(one, attr)]
    return unknown


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama; every page loads its own, because pages change it."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        bos_token_id=None, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def namespace(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """The names that a page starts with, in an empty directory; registration is put back later."""
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


@pytest.mark.parametrize("page", pages_with_code())
def test_the_code_of_a_page_runs(page: Path, namespace: dict[str, Any]) -> None:
    if page in WHOLE:
        del namespace["model"], namespace["inputs"]
    ran = run(page, namespace)
    marked_alone = (README, DOCS / "index.md")
    assert ran or page in marked_alone, "every block is marked as not run"


def test_blocks_that_do_not_run_are_python_with_names_that_are_there() -> None:
    code = "from hf_kvret.testing import MODELS, NONE\nhf_kvret.attach(m)\nhf_kvret.Nothing()"
    assert unknown_names(code) == ["hf_kvret.testing.NONE", "hf_kvret.Nothing"]
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python" and not block.runs:
                assert not unknown_names(block.text), f"{name(page)}, line {block.line}"


@pytest.mark.slow
def test_the_first_steps_get_their_answers(namespace: dict[str, Any]) -> None:
    run(FIRST_STEPS, namespace)
    # With full attention the bundled model answers nearly all, by guessing it would answer none.
    assert namespace["right"] >= 0.9 * len(namespace["questions"])
    assert all(layer["selected"] > 0 for layer in namespace["fork"].stats()["layers"])


def test_concepts_name_the_counts_and_bytes_of_the_code(
    namespace: dict[str, Any], tmp_path: Path
) -> None:
    counted: set[str] = set()
    options = {"top_k": 8, "track_recall": True, "dense_below": 0}
    tokens = namespace["inputs"]["input_ids"][:, :600]
    for method, cls in hf_kvret.registered_methods().items():
        # The model has no latent attention, and no indexer of its own.
        if not cls.Config.retrieves or cls.Config.follows_model:
            continue
        model, learned = namespace["model"], {}
        if cls.needs_artifact:
            learned = {"artifact": tiny_artifact(model, method, tmp_path / method)}
        # AQUA-KV, which attends to everything, has no slots.
        slots = {} if method == "aqua" else {"store": "resident"}
        groups = {"select_every": 2} if cls.Config.takes("select_every", 2) else {}
        cache = cls(model.config, **options, **slots, **groups, **learned)
        model.generate(tokens, past_key_values=cache, max_new_tokens=2, do_sample=False)
        counted |= {name for layer in cache.stats()["layers"] for name in layer}
    entries = re.findall(r"^\| (`[\w`, ]+`) \|", prose(DOCS / "concepts.md"), flags=re.MULTILINE)
    names = {word for cell in entries for word in re.findall(r"\w+", cell)}
    report = cache.memory()
    members = {member for member, _ in inspect.getmembers(report) if not member.startswith("_")}
    assert names == counted | members


def test_the_commands_of_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    offered = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    # Results name the commands of their version.
    for page in (page for page in PAGES if "results" not in page.parts):
        for call in re.findall(r"hf-kvret demo[^\n`]*", page.read_text(encoding="utf-8")):
            flags = set(re.findall(r"--[\w-]+", call))
            assert flags <= offered, f"{name(page)}: {call}"
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # Results of 0.1.0 name commands that only this version has.
        for script in re.findall(r"python (examples/\S+\.py)", text):
            known = (ROOT / script).is_file() or "Version 0.1.0 has the program." in text
            assert known, f"{name(page)}: {script}"


LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}


def goals(page: Path) -> dict[str, Path]:
    """The files that a page links to, by what stands in the link."""
    targets = (one for one in LINK.findall(prose(page)) if not re.match(r"https?://", one))
    files = ((one, one.partition("#")[0]) for one in targets)
    return {target: (page.parent / file).resolve() if file else page for target, file in files}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target, goal in goals(page).items():
            anchor = target.partition("#")[2]
            if not goal.exists() or (anchor and anchor not in anchors(goal)):
                broken.append(f"{name(page)}: {target}")
    assert not broken


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, stack = set(), [README]
    while stack:
        page = stack.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            stack += goals(page).values()
    assert not set(PAGES) - seen


def test_the_lines_of_choose_make_caches() -> None:
    """Each way by machine ends in arguments of ``generate``, or in none of ours."""
    rows = table(DOCS / "choose.md", "machine", "model", "context")
    ends = [cells[-1] for cells in rows if cells[-1] != "none: leave the argument out"]
    lines = [ast.parse(f"f({end.strip('`')})", mode="eval").body for end in ends]
    assert len(lines) >= 6
    for call in lines:
        assert isinstance(call, ast.Call)
        arguments = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        config = hf_kvret.registered_methods()[arguments["cache_implementation"]].Config
        config(**arguments.get("cache_config", {}))


def test_the_schedule_of_paris_is_that_of_the_code() -> None:
    page = DOCS / "methods" / "paris.md"
    rows = table(page, "cold tokens", "β, candidates")
    entries = [(cells[0], float(cells[1]), float(cells[2])) for cells in rows]
    schedule = SCHEDULES["ours"]
    assert [row[1:] for row in entries] == [row[1:] for row in schedule]
    assert [row[0] for row in entries[:-1]] == [f"below {row[0]:,}" for row in schedule[:-1]]
    said = re.search(r"those of the released code: ([^:]*?)from there on", page.read_text())
    assert said is not None
    numbers = [float(number) for number in re.findall(r"\b0\.\d+", said[1])]
    assert numbers == [number for row in SCHEDULES["paper"] for number in row[1:]]


def test_every_method_has_a_page_and_a_row_in_choose() -> None:
    methods = sorted(hf_kvret.registered_methods())
    assert sorted(page.stem for page in (DOCS / "methods").glob("*.md")) == methods
    rows = table(DOCS / "choose.md", "method", "finds tokens by")
    assert sorted(re.sub(r"\(.*|\W", "", cells[0]) for cells in rows) == methods


def test_the_list_of_models_is_that_of_the_conformance_suite() -> None:
    rows = table(DOCS / "models.md", "full-attention layers", "model types")
    types = [name for cells in rows for name in re.findall(r"`(\w+)`", cells[1])]
    assert sorted(types) == sorted(MODELS)


CACHES_OF_README = ("flat", "paris", "lrqk", "ctkvr", "a2ats", "aqua")
README_TEXT = README.read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len(README_TEXT.splitlines()) <= 90
    assert README_TEXT.count("![") == 1


def cells(text: str) -> list[list[str]]:
    """The rows of a markdown table, without its rule."""
    rows = [line for line in text.splitlines() if line.startswith("|") and set(line) - set("|- ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def shown(name: str) -> list[list[str]]:
    """The rows of a table of the README."""
    found = re.search(rf"<!-- table of {name} -->\n(.*?)<!-- end -->", README_TEXT, re.DOTALL)
    assert found is not None
    return cells(found[1])


def test_the_tables_of_the_readme_are_of_the_results() -> None:
    steps = Results.load(DOCS / "results" / "decode_qwen3_cpu.json")
    _, *speed = shown("speed")
    for row, cache in zip(speed, ("static", *CACHES_OF_README[:4]), strict=True):
        step = steps.find({"cache": cache, "context": 32_768, "batch": 1})
        assert step is not None and cache in row[0]
        assert row[2:] == [f"{1e3 * step['seconds']:.0f}", f"{step['device_bytes'] / 1e9:.1f}"]
    text = Results.load(DOCS / "results" / "smollm2_agreement.json")
    (_, _, *names), (_, full, *rows) = shown("agreement")
    assert full == "100%" and names == [f"`{cache}`" for cache in CACHES_OF_README]
    for cache, row in zip(CACHES_OF_README, rows, strict=True):
        learned = f":artifact=smollm2-{cache}" if cache in ("a2ats", "aqua") else ""
        options = f"{cache}{learned}" + ("" if cache == "aqua" else ":top_k=0.06")
        same = text.find({"cache": options, "length": 4096})
        assert same is not None and row == f"{same['forced_equal']:.0%}"


def test_the_table_of_the_index_is_of_the_results_of_the_demo() -> None:
    results = Results.load(DOCS / "results" / "demo" / "demo.json")
    header, *rows = cells(Demo.table(results).partition("recall / mass")[0])
    measured = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    columns = ("answers right", "new tokens/s", "device MB", "cold rows read")
    shown = table(DOCS / "index.md", "cache", *columns)
    assert len(shown) == 3
    for name_of, *numbers in shown:
        cache = measured[name_of.split("`")[1]]
        assert numbers == [cache[column] for column in columns]


@pytest.mark.slow
def test_the_bytes_of_the_readme_are_those_of_fits(capsys: pytest.CaptureFixture[str]) -> None:
    entries = re.search(r"([\d.]+) against ([\d.]+) MiB for ([\d,]+) tokens", README_TEXT)
    coded = re.search(r'`store="higgs-host"`\), the total is ([\d.]+) MiB', README_TEXT)
    assert entries and coded
    where = ["--stores", "host,higgs-host", "--device-memory", "4GB"]
    context = entries[3].replace(",", "")
    arguments = ["fits", str(REFERENCE_MODEL), "--context", context, "--caches", "full,paris"]
    assert main([*arguments, *where, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    bytes_of = {row["cache"]: row["device_bytes"] + row["host_bytes"] for row in rows}
    caches = ("paris:store=host", "full", "paris:store=higgs-host")
    assert [f"{bytes_of[name] / 2**20:.1f}" for name in caches] == [
        entries[1],
        entries[2],
        coded[1],
    ]


@pytest.mark.slow
def test_the_table_of_choose_is_that_of_fits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {cells[0]: cells for cells in table(DOCS / "choose.md", "cache", "index", "store")}
    words = "fits llama-3.1-8b --context 128K --device-memory 24GB --host-memory 64GB --caches"
    names = ("full", "paris:store=host", "lrqk:store=host", "ctkvr:store=host")
    assert main([*words.split(), ",".join(names)]) == 0
    lines = [line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines()]
    made = [[cell.strip() for cell in line] for line in lines if line[0].strip() in names]
    # The page leaves out columns 2 and 9: the window, and what a step reads.
    assert [[*cells[:1], *cells[2:8], cells[9]] for cells in made] == [rows[x] for x in names]


def promises() -> list[tuple[str, str]]:
    """Promises and what is named beside them."""
    lines = [
        line
        for line in (DOCS / "promises.md").read_text(encoding="utf-8").splitlines()
        if line[:2] == "| "
    ]
    rows = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines]
    return [(row[0], row[1]) for row in rows if row != ("promise", "test")]


def test_every_promise_is_held_by_a_test() -> None:
    assert len(promises()) > 20
    for promise, test in promises():
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
        assert match, f"{promise!r} names {test!r} instead of one test"
        path, name = match.groups()
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in text, f"{promise!r} names {test!r}, which is not there"
