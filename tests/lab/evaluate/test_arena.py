"""``hf-kvret eval arena``: bytes, answers and uses of any cache, and strange ones are found out."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvret.cli import main
from hf_kvret.lab import opponents
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.usage import attention_keys, step_bytes
from hf_kvret.lab.report.results import Results

STRANGERS = '''
import torch
from transformers import DynamicCache

kept = {}


class Copies(DynamicCache):
    """Keeps codes beside all rows, and reports the codes."""

    reported_bytes, file = 1000, torch.from_file(__file__, size=64, dtype=torch.uint8)

    def crop(self, count):
        raise ZeroDivisionError

    def update(self, keys, values, layer, *args, **kwargs):
        keys, values = super().update(keys, values, layer)
        self.codes = {**getattr(self, "codes", {}), layer: (keys.clone(), values.clone())}
        return keys, values


class Views(DynamicCache):
    """The newest eight tokens, as views of all that there were."""

    def update(self, keys, values, layer, *args, **kwargs):
        keys, values = super().update(keys, values, layer)
        self.layers[layer].keys, self.layers[layer].values = keys[:, :, -8:], values[:, :, -8:]
        return keys, values


class Codes(DynamicCache):
    """Keeps half of the bytes, and makes whole keys of them in each step."""

    def update(self, keys, values, layer, *args, **kwargs):
        keys, values = super().update(keys.bfloat16(), values.bfloat16(), layer)
        return keys.float(), values.float()


class Shared(DynamicCache):
    """Goes on in the rows of the first one."""

    def __init__(self, config):
        super().__init__(config=config)
        self.layers = kept.setdefault("layers", self.layers)


def make(model, kind):
    return globals()[kind](config=model.config)


def broken(model):
    raise RuntimeError("made for another transformers")


def spoils(model):
    model.model.layers[0].mlp.forward = lambda x: 0 * x
    return DynamicCache(config=model.config)
'''


def test_strange_caches_are_found_out(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, file = tmp_path / "theirs.py", tmp_path / "arena.json"
    theirs.write_text(STRANGERS)
    kinds = ("Copies", "Views", "Codes", "Shared")
    strange = [f"{kind.lower()}={theirs}:make:kind={kind}" for kind in kinds]
    ours = "paris:top_k=1.0:dense_below=0:recent=16:flush=16"
    exact = "flat:top_k=8:dense_below=0:recent=16:flush=16:lossless=true"
    words = ["--model", tiny_model_dir, "--text", tiny_text, "--context", 340, "--new-tokens", 4]
    words += ["--depths", 50, "--answer-tokens", 2, "--json", file, "--plot", tmp_path / "x.png"]
    fails = f"spoils={theirs}:spoils", f"bad={theirs}:broken"
    words += ["--caches", ",".join([fails[0], "full", ours, exact, *strange, fails[1]])]
    assert main(["eval", "arena", *map(str, words)]) == 1
    printed = capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert printed.count("made for another transformers") == 1
    rows = {cell["cache"].partition(":")[0]: row for cell, row in Results.load(file)}
    assert rows.keys() == {"full", "paris", "flat", *map(str.lower, kinds)}

    def over_full(name: str) -> list[float]:
        row = rows[name]
        return [a / b for a, b in zip(row["held_bytes"], row["held_full_bytes"], strict=True)]

    full = rows["full"]
    # The tiny model has two layers, two heads of 64 numbers in fp32.
    assert full["held_bytes"] == [(340 + more) * 2 * 2 * 2 * 64 * 4 for more in (0, 1, 4)]
    assert full["kl_max"] == 0 and full["forced_equal"] == 1 and full["unpacked"] == 0
    assert set(full["modes"].values()) <= {0.0, full["modes"]["reset"]}
    assert rows["paris"]["kl_max"] < 1e-6 < rows["codes"]["kl_max"]
    assert rows["paris"]["unpacked"] == 0 and over_full("paris")[0] > 1
    assert over_full("copies") == pytest.approx([2, 2, 2])
    assert rows["copies"]["reported_bytes"] == 1000 and rows["codes"]["reported_bytes"] is None
    assert rows["copies"]["mapped_bytes"] == 64 and "| in mapped files |" in printed
    assert rows["copies"]["step_bytes"] == rows["copies"]["held_bytes"][-1] + 64
    assert rows["copies"]["modes"]["crop"].startswith("raises ZeroDivisionError")
    assert over_full("views")[0] == pytest.approx(1) and over_full("views")[1] < 0.1
    assert over_full("codes") == pytest.approx([0.5, 0.5, 0.5])
    assert rows["codes"]["unpacked"] == 2
    assert rows["codes"]["peak_bytes"] > full["peak_bytes"] + full["held_bytes"][-1] / 8
    second = {name: row["modes"]["second request"] for name, row in rows.items()}
    assert second["copies"] == 0 and 0 < second["codes"] < 1e-2 < second["shared"]
    assert rows["paris"]["modes"]["crop"] < 1e-6 > rows["flat"]["modes"]["reset"]
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    order = [line.split("|")[1].split(":")[0].strip() for line in lines[2 : 2 + len(rows)]]
    assert order == sorted(rows, key=lambda name: over_full(name)[-1])
    assert transformers.__version__ in lines[-1]


def test_a_picture_is_drawn_where_every_cache_failed(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, picture = tmp_path / "theirs.py", tmp_path / "x.png"
    theirs.write_text(STRANGERS)
    words = ["--model", tiny_model_dir, "--text", tiny_text, "--context", 340, "--plot", picture]
    words += ["--caches", f"bad={theirs}:broken", "--new-tokens"]
    assert main(["eval", "arena", *map(str, words), "2"]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The first step is not timed, so one alone says nothing.
    with pytest.raises(SystemExit):
        main(["eval", "arena", *map(str, words), "1"])
    assert "--new-tokens" in capsys.readouterr().err


def test_bytes_of_a_step_are_its_peak_and_all_that_it_makes() -> None:
    held = {"rows": torch.zeros(0)}

    def step() -> None:
        for _ in range(3):
            torch.zeros(1000, dtype=torch.uint8)
        held["rows"] = torch.zeros(400, dtype=torch.uint8)

    # The rows of the step before are dropped when there are new ones.
    assert step_bytes(step) == (1000, 3400)


def test_keys_are_seen_at_the_attention_function(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attention_keys(subject.model) as keys, torch.inference_mode():
        subject.model(torch.arange(3, 10)[None], use_cache=False)
    assert [key.shape for key in keys] == [(1, 2, 7, 64)] * 2
    model: Any = subject.model
    model(torch.arange(3, 10)[None], use_cache=False)
    assert len(keys) == 2
    # A function that a package has put into the table stays there.
    table, name = ALL_ATTENTION_FUNCTIONS, model.config._attn_implementation
    monkeypatch.setitem(table._local_mapping, name, print)
    with attention_keys(model):
        assert table[name] is not print
    assert table[name] is print


@pytest.mark.parametrize(
    ("name", "package"),
    [
        *(("turbokv", "turbokv"), ("quantcore", "quantcore-ai")),
        *(("tiny_turboquant", "tiny-turboquant"), ("kakeyalattice", "kakeyalattice")),
        *(("turboquant_torch", "turboquant-torch"), ("nexusquant", "nexusquant-kv")),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_line(
    name: str, package: str, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("turboquant", "tiny_turboquant", "kakeyalattice", "nexusquant"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install .* peers {package}=="):
        getattr(opponents, name)(subject.model)


def test_what_a_package_lacks_is_named_as_it_is(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny_turboquant.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nothing_of_this_name'$"):
        opponents.tiny_turboquant(subject.model)
