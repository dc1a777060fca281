"""The planted faults still have their places in the code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from planted import FAULTS, ROOT


def test_every_fault_has_one_place_and_a_name_of_its_own() -> None:
    lost = [f.name for f in FAULTS if (ROOT / f.file).read_text("utf-8").count(f.right) != 1]
    assert not lost, "move these faults along with the code"
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    assert all((ROOT / fault.tests[0]).exists() for fault in FAULTS if fault.tests)
