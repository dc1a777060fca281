"""The text of a document: plain, Markdown or HTML, from a file."""

from __future__ import annotations

import codecs
import re
import sys
from contextlib import nullcontext
from pathlib import Path

from hf_kvret.saved.identity import printable

# The longer mark first: that of UTF-16 begins it.
_MARKS = {
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
}
_HTML = (".html", ".htm", ".xhtml")
_OTHERS = (".pdf", ".doc", ".docx", ".odt", ".epub", ".rtf")
_BLOCKS = (
    *("p", "br", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "pre", "blockquote"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "hr", "section", "article", "header", "footer"),
)
# A browser does not show the content of these.
_HIDDEN = ("script", "style", "template", "noscript", "head")


def document_text(path: Path, most_bytes: int) -> str:
    """The text of a file or a pipe; ``-`` is standard input. No host is asked for anything.

    It is UTF-8, or UTF-16 or UTF-32 with a byte order mark. Nothing that it refers to is read.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: HTML without beautifulsoup4.
        ValueError: larger than ``most_bytes``, of another kind, not of these encodings, or without
            text.
    """
    name = printable(str(path))
    if not is_stream(path) and not path.is_file():
        raise FileNotFoundError(f"no file {name}: give a text, Markdown or HTML file, or a pipe")
    if path.suffix.lower() in _OTHERS:
        raise ValueError(f"{name} is no text: save it as text, Markdown or HTML")
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(
            f"{name} has more than {most_bytes:,} bytes, and at most so many are read: give a part "
            "of it, or a larger --most-bytes"
        )
    encoding = next((x for mark, x in _MARKS.items() if content.startswith(mark)), "utf-8-sig")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not {encoding.removesuffix('-sig').upper()} text ({error}): save it as "
            "UTF-8, as with iconv -f latin1 -t utf8"
        ) from error
    if path.suffix.lower() in _HTML:
        text = _text_of_html(text)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text or not text.strip():
        raise ValueError(f"{name} has {'null characters' if chr(0) in text else 'no text'} in it")
    return text


def is_stream(path: Path) -> bool:
    """Whether a document comes from standard input, a pipe or a device, so that it has no name."""
    return str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir())


def _text_of_html(content: str) -> str:
    try:
        from bs4 import BeautifulSoup
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "HTML needs beautifulsoup4: pip install beautifulsoup4, or save the page as text"
        ) from error
    page = BeautifulSoup(content, "html.parser")
    for hidden in page(_HIDDEN):
        hidden.decompose()
    for text in page.find_all(string=True):
        if text.find_parent("pre") is None:
            text.replace_with(re.sub(r"\s+", " ", text))
    for block in page(_BLOCKS):
        block.insert_before("\n")
        block.insert_after("\n")
    lines = (line.rstrip() for line in page.get_text().splitlines())
    return "\n".join(line for line in lines if line)
