"""Looks at the built site in Chromium: ``python docs/site/look.py`` writes screenshots.

Some pages in phone and desktop width, light and dark, into ``build/site/screenshots``, and a search
from the pages as they lie in the folder. Skipped, with the reason, where there is no Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = ("index", "choose", "recipes", "troubleshooting", "api")
WIDTHS = {"phone": (500, 1100), "desktop": (1400, 1000)}
# Values of Chromium's setting preferredColorScheme.
SCHEMES = {"dark": 0, "light": 1}
SEARCH = """
<script>
addEventListener("load", () => {
  const worker = new Worker("assets/javascripts/workers/NAME")
  worker.onmessage = ({ data }) => {
    if (data.type === 1) worker.postMessage({ type: 2, data: { input: "streamer" } })
    if (data.type === 3) document.body.dataset.answer = JSON.stringify(data.data)
  }
  worker.postMessage({ type: 0, data: __index })
})
</script>
"""


def chromium(*arguments: str) -> str:
    """Runs it on a profile that is thrown away; returns what it prints."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    assert binary
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        # Nothing may be fetched: every name is unknown.
        flags.append("--host-resolver-rules=MAP * ~NOTFOUND")
        command = [binary, *flags, "--virtual-time-budget=5000", *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=240
        ).stdout


def shoot(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        for width, size in WIDTHS.items():
            for scheme, number in SCHEMES.items():
                out = folder / f"{page}-{width}-{scheme}.png"
                chromium(
                    f"--screenshot={out}",
                    f"--window-size={size[0]},{size[1]}",
                    f"--blink-settings=preferredColorScheme={number}",
                    (SITE / "html" / f"{page}.html").as_uri(),
                )
                if out.stat().st_size < 10_000:
                    sys.exit(f"{out} is all but empty")
    print(f"{len(PAGES) * 4} screenshots in {folder}")


def search() -> None:
    """Asks the site's own worker, from a page opened as a file."""
    html = SITE / "html"
    worker = next((html / "assets/javascripts/workers").glob("search.*.js")).name
    page = html / "search-check.html"
    scripts = '<script src="site/iframe-worker.js"></script><script src="search.js"></script>'
    page.write_text(f"<body>{scripts}{SEARCH.replace('NAME', worker)}</body>")
    try:
        dom = chromium("--dump-dom", page.as_uri())
    finally:
        page.unlink()
    answer = re.search(r'data-answer="([^"]*)"', dom)
    if not answer or "items" not in answer[1] or "[]" in answer[1][:40]:
        sys.exit(f"the search of the site answers nothing: {dom[-500:]}")
    print("the search answers, from a folder and offline")


def main() -> None:
    if not (shutil.which("chromium") or shutil.which("chromium-browser")):
        print("skipped: the pages were not looked at, there is no chromium here")
        return
    shoot(SITE / "screenshots")
    search()


if __name__ == "__main__":
    main()
