"""Builds the site: ``python docs/site/build.py`` writes ``build/site/html``, which works offline.

The pages of ``docs/`` are copied, and what of the repository they link to beside them: Markdown
and notebooks become pages too, other files are shown as text. Formulas become MathML. Then Zensical
builds, and every link of what it wrote is followed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from links import check
from notebooks import as_markdown, read

SITE = Path(__file__).parent
DOCS = SITE.parent
ROOT = DOCS.parent
TOP_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# Folders of files of the repository that pages link to.
SOURCES = "source"
ASSETS = (".md", ".png", ".svg", ".css", ".js", ".json", ".txt")
FENCE = re.compile(r"^( *)(`{3,})(\w*)")
# Its text may have begun on the line before.
LINK = re.compile(r"((?:(?<!`)\[|^)[^\[\]]*\]\()([^)\s#]+)([^)\s]*\))")
FORMULA = re.compile(r"^\$\$(.+?)\$\$$", flags=re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".cpp": "cpp"}


class Stage:
    """A folder of pages for the tool, with all that they link to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waiting: list[Path] = []

    def place(self, source: Path) -> Path:
        """Where a file or folder of the repository goes."""
        if source.is_relative_to(DOCS) and (source.is_dir() or source.suffix in ASSETS):
            return self.folder / source.relative_to(DOCS)
        inside = source.relative_to(ROOT)
        if str(inside) in TOP_PAGES:
            return self.folder / inside
        if source.is_dir():
            return self.folder / SOURCES / inside / "index.md"
        name = inside if source.suffix in ASSETS else Path(f"{inside}.md")
        return self.folder / SOURCES / name

    def fill(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for source in sorted(DOCS.rglob("*")):
            if source.is_file() and source.suffix in ASSETS:
                self.add(source)
        for name in TOP_PAGES:
            if (ROOT / name).is_file():
                self.add(ROOT / name)
        while self.waiting:
            self.add(self.waiting.pop())

    def add(self, source: Path) -> None:
        place = self.place(source)
        if place.exists():
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            place.write_text(listing(source), encoding="utf-8")
        elif source.suffix == ".md":
            place.write_text(self.page(source, source.read_text("utf-8")), encoding="utf-8")
        elif source.suffix == ".ipynb":
            text = as_markdown(read(source), source, place.parent)
            place.write_text(self.page(source, text), encoding="utf-8")
        elif place.suffix == ".md":
            place.write_text(listing_of_text(source), encoding="utf-8")
        else:
            shutil.copyfile(source, place)

    def page(self, source: Path, text: str) -> str:
        """The text of a page with links to the stage; fenced blocks stay as they are."""
        text = FORMULA.sub(lambda found: convert(found[1], display="block"), text)
        lines, fence = [], ""
        for line in text.splitlines():
            mark = FENCE.match(line)
            if mark and not fence:
                fence = mark[2]
            elif mark and line.strip() == fence:
                fence = ""
            elif not fence:
                line = LINK.sub(lambda found: self.link(source, found), line)
            lines.append(line)
        return "\n".join(lines) + "\n"

    def link(self, source: Path, found: re.Match[str]) -> str:
        """A link to a file of the repository leads to its copy, which is made."""
        goal = (source.parent / found[2]).resolve()
        if re.match(r"[a-z]+:", found[2]) or not goal.exists() or not goal.is_relative_to(ROOT):
            return found[0]
        if goal.is_dir() and (goal / "README.md").is_file():
            goal = goal / "README.md"
        self.waiting.append(goal)
        path = os.path.relpath(self.place(goal), self.place(source).parent)
        return f"{found[1]}{path}{found[3]}"


def listing(folder: Path) -> str:
    """A page of the names in a folder of the repository."""
    names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in folder.iterdir())
    rows = "\n".join(f"- `{name}`" for name in names if not name.startswith(("__", ".")))
    return f"# {folder.relative_to(ROOT)}/\n\nA folder of the repository:\n\n{rows}\n"


def listing_of_text(source: Path) -> str:
    """A page with the text of a file of the repository."""
    text = source.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    language = LANGUAGES.get(source.suffix, "text")
    return f"# {source.relative_to(ROOT)}\n\n{fence}{language}\n{text}{fence}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="a folder")
    out = parser.parse_args().out.resolve()
    Stage(out / "pages").fill()
    shutil.rmtree(out / "html", ignore_errors=True)
    config = (SITE / "zensical.toml").read_text(encoding="utf-8")
    # Where mkdocstrings finds the packages.
    config = config.replace('paths = ["."]', f'paths = ["{ROOT}", "{ROOT / "kernels"}"]')
    (out / "zensical.toml").write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(
        command, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # It colours each letter of a page that it finds fault with.
    print(re.sub("\x1b\\[[0-9;]*m", "", built.stdout))
    return built.returncode or check(out / "html")


if __name__ == "__main__":
    sys.exit(main())
