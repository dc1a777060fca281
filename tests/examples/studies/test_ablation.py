"""What the studies' scripts share: their commands, what is said before the work, and pages."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.measurement import script_parser

from ...docs.pages import site_tool

report = site_tool("report")
load_measurement = report.load_measurement
ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
PAGES = {"eval assumptions": "assumptions", "eval paris-stages": "paris_stages"}


@pytest.mark.parametrize("title", report.SCRIPTS)
def test_every_script_describes_itself_and_has_a_smallest_run(title: str) -> None:
    study = load_measurement(title)
    assert study.title() == title
    text = sys.modules[study.__module__].__doc__
    assert text and f"{report.command_line(title)} " in text
    parser = script_parser(study)
    for action in parser._actions:
        assert action.help, action.option_strings
    words = study.smallest.split()
    assert words and parser.parse_args(["--smallest", *words]).smallest


@pytest.mark.parametrize("name", ["literal", "assumptions", "paris-stages"])
def test_what_the_last_cell_lacks_is_said_before_the_first(
    name: str, refused: Any, tiny_model_dir: Path, tiny_text: Path, tmp_path: Path
) -> None:
    more = ["--calibration-tokens", "1K", "--calibration-text", __file__] * (name == "literal")
    given = ["--model", str(tiny_model_dir), "--text", str(tiny_text), "--context", "64,32K"]
    path = tmp_path / "x.json"
    assert "give a shorter" in refused(
        load_measurement(f"eval {name}"), *given, *more, "--json", str(path)
    )
    assert not path.exists()


@pytest.mark.parametrize("title", PAGES)
def test_set_ups_have_the_entries_of_the_results_that_are_there(title: str) -> None:
    """Else those could not be gone on with."""
    old = json.loads((RESULTS / f"{PAGES[title]}.json").read_text())["setup"]
    study = load_measurement(title)(text=Path(__file__))
    subject = {"model", "class", "parameters", "dtype", "fingerprint", "device", "seed"}
    assert {*study.details(), *subject, "top_k", "store"} == old.keys()
