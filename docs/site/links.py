"""Links of a built site: ``python docs/site/links.py [FOLDER]`` follows those inside it.

``--external`` lists those that leave it, with the pages they stand on, and ``--ask`` asks each
server whether its page is there; nothing else here needs a network.
"""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

DEFAULT = Path(__file__).parents[2] / "build" / "site" / "html"
# A browser fetches these by itself when it shows a page.
FETCHED = {"img": "src", "script": "src", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """What a page links to, what it has fetched, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = {name: value for name, value in attrs if value}
        self.anchors |= {own[name] for name in ("id", "name") if name in own}
        if tag == "a" and "href" in own:
            self.links.append(own["href"])
        elif tag == "link" and own.get("rel", "") not in ("canonical", "prev", "next", "alternate"):
            self.fetched.append(own.get("href", ""))
        elif FETCHED.get(tag, "") in own:
            self.fetched.append(own[FETCHED[tag]])


def is_external(link: str) -> bool:
    return link.startswith(("http://", "https://", "//"))


def read(folder: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}


def faults(folder: Path, pages: dict[Path, Page]) -> list[str]:
    """Links that lead nowhere, and what is fetched from other servers."""
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        for link in page.fetched:
            if is_external(link):
                found.append(f"{name}: fetches {link}")
        for link in page.links + page.fetched:
            if is_external(link) or link.startswith(("mailto:", "data:", "javascript:")):
                continue
            place, anchor = urldefrag(link)
            # The page of what is not found has links from the top.
            top = folder if place.startswith("/") else path.parent
            goal = (top / unquote(place).lstrip("/")).resolve() if place else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file():
                found.append(f"{name}: {link}")
            elif anchor and goal in pages and unquote(anchor) not in pages[goal].anchors:
                found.append(f"{name}: {link}, no such anchor")
    return found


def check(folder: Path) -> int:
    """Prints what is wrong; returns an exit status."""
    folder = folder.resolve()
    pages = read(folder)
    broken = faults(folder, pages)
    print("\n".join(broken), file=sys.stderr) if broken else None
    inside = sum(not is_external(link) for page in pages.values() for link in page.links)
    print(f"{len(pages)} pages, {inside} links inside, {len(broken)} faults")
    return int(bool(broken) or not pages)


def list_external(folder: Path, ask: bool) -> int:
    """Prints each link out of the site, and the pages that have it; returns an exit status."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path, page in read(folder).items():
        for link in page.links:
            if is_external(link):
                homes[link].add(str(path.relative_to(folder)))
    failures = 0
    for link in sorted(homes):
        state = status(link) if ask else "unchecked"
        failures += state.startswith("failed")
        print(f"{state:12} {link}  ({', '.join(sorted(homes[link])[:3])})")
    return int(failures > 0)


def status(link: str) -> str:
    request = urllib.request.Request(link, headers={"User-Agent": "hf_kvret-docs"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return str(answer.status)
    except (urllib.error.URLError, TimeoutError) as error:
        return f"failed: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--external", action="store_true", help="list links out of the site")
    parser.add_argument("--ask", action="store_true", help="ask the servers of these")
    options = parser.parse_args()
    if options.external or options.ask:
        return list_external(options.folder, options.ask)
    return check(options.folder)


if __name__ == "__main__":
    sys.exit(main())
