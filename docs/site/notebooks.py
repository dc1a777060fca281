"""Runs the notebooks of ``examples/notebooks``: ``python docs/site/notebooks.py [NAME ...]``.

Each must run without an error. ``--write`` keeps what it printed and drew in the file, without bars
and what a program adds about itself. Takes the extra ``notebooks``.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
MOST_SECONDS = 600
MOST_OUTPUT_BYTES = 200_000
# Folders of somebody's machine, and not URLs or fractions.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/])(/(home|Users|root|tmp|var|work|opt|usr|mnt|private)/|[A-Z]:\\)"
)
PICTURE = "image/png"


def read(path: Path) -> dict[str, Any]:
    """A notebook as its JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    """The text of a cell, which files hold as one string or as lines."""
    return "".join(cell["source"])


def texts(cell: dict[str, Any]) -> list[str]:
    """What a cell printed or returned, as text; pictures left out."""
    found = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        plain = output.get("text", "" if PICTURE in data else data.get("text/plain", ""))
        found.append("".join(plain))
    return [one for one in found if one]


def pictures(cell: dict[str, Any]) -> list[bytes]:
    """The PNG files that a cell drew."""
    shown = [output.get("data", {}) for output in cell.get("outputs", [])]
    return [base64.b64decode("".join(data[PICTURE])) for data in shown if PICTURE in data]


def faults(notebook: dict[str, Any]) -> list[str]:
    """What is wrong with the outputs that a notebook keeps."""
    found = []
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        if cell["execution_count"] != number:
            found.append(f"cell {number} was run as {cell['execution_count']}: --write runs all")
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                found.append(f"cell {number} ended in {output['ename']}: {output['evalue']}")
            if output.get("name") == "stderr":
                found.append(f"cell {number} keeps bars or warnings (stderr)")
        if MACHINE_PATH.search("\n".join([source(cell), *texts(cell)])):
            found.append(f"cell {number} names a folder of a machine")
    if not any(texts(cell) for cell in cells):
        found.append("nothing was printed")
    size = len(json.dumps([cell["outputs"] for cell in cells]))
    if size > MOST_OUTPUT_BYTES:
        found.append(f"outputs of {size:,} bytes: at most {MOST_OUTPUT_BYTES:,}")
    return found


def run(path: Path) -> dict[str, Any]:
    """The notebook after a run in a fresh kernel, tidied.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; says which, with its trace.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook, timeout=MOST_SECONDS, kernel_name="python3", resources=place, record_timing=False
    )
    client.execute()
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook["cells"], start=1):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
        if cell["cell_type"] == "code":
            cell["outputs"] = [one for one in cell["outputs"] if one.get("name") != "stderr"]
            for output in cell["outputs"]:
                if "metadata" in output:
                    output["metadata"] = {}
    return json.loads(nbformat.writes(nbformat.from_dict(notebook)))


def as_markdown(notebook: dict[str, Any], path: Path, folder: Path) -> str:
    """A page of the notebook of ``path``: text, code and outputs; pictures go to ``folder``."""
    parts, drawn = [], 0
    for cell in notebook["cells"]:
        text = source(cell)
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        parts += [f"```text\n{one.rstrip()}\n```" for one in texts(cell)]
        for picture in pictures(cell):
            drawn += 1
            file = folder / f"{path.stem}-{drawn}.png"
            file.write_bytes(picture)
            parts.append(f"![what the cell drew]({file.name})")
    place = path.relative_to(ROOT)
    parts.append(f"---\n\n*A notebook of the repository with its outputs: `{place}`.*")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="notebooks to run, as needle; all without")
    parser.add_argument("--write", action="store_true", help="keep the outputs in the files")
    options = parser.parse_args()
    paths = [FOLDER / f"{name}.ipynb" for name in options.names] or sorted(FOLDER.glob("*.ipynb"))
    wrong = 0
    for path in paths:
        started = time.perf_counter()
        notebook = run(path)
        print(f"{path.stem}: ran in {time.perf_counter() - started:.0f} s")
        found = faults(notebook)
        wrong += len(found)
        print("".join(f"{path.stem}: {one}\n" for one in found), end="", file=sys.stderr)
        if options.write:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(f"{text}\n", encoding="utf-8")
    return int(wrong > 0 or not paths)


if __name__ == "__main__":
    sys.exit(main())
