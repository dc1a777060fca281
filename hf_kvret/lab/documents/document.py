"""The text of a document: plain, Markdown or HTML, from a file."""

from __future__ import annotations

import re
from pathlib import Path

_HTML = (".html", ".htm", ".xhtml")
_OTHERS = (".pdf", ".doc", ".docx", ".odt", ".epub", ".rtf")
_BLOCKS = (
    *("p", "br", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "pre", "blockquote"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "hr", "section", "article", "header", "footer"),
)
# A browser does not show the content of these.
_HIDDEN = ("script", "style", "template", "noscript", "head")


def document_text(path: Path, most_bytes: int) -> str:
    """The text of a file. Nothing that it refers to is read, and no host is asked for anything.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: HTML without beautifulsoup4.
        ValueError: larger than ``most_bytes``, of another kind, not UTF-8, or without text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give a text, Markdown or HTML file")
    size = path.stat().st_size
    if size > most_bytes:
        raise ValueError(
            f"{path} has {size:,} bytes, and at most {most_bytes:,} are read: give a part of it, "
            "or a larger --most-bytes"
        )
    if path.suffix.lower() in _OTHERS:
        raise ValueError(f"{path} is no text: save it as text, Markdown or HTML")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error}): save it as that, as with iconv -f latin1 -t utf8"
        ) from error
    if path.suffix.lower() in _HTML:
        text = _text_of_html(text)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text or not text.strip():
        raise ValueError(f"{path} has {'null characters' if chr(0) in text else 'no text'} in it")
    return text


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
