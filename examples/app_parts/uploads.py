"""Text out of what somebody chose as a document. Each refusal names the way out."""

from __future__ import annotations

import unicodedata
from pathlib import PurePath

SUFFIXES = (".txt", ".md", ".rst", ".text", ".log", ".csv", ".tex", ".py", "")


def check_size(count: int, most: int, name: str) -> None:
    """ValueError for more than ``most`` bytes."""
    if count > most:
        raise ValueError(
            f"{name} has {size_text(count)}, and at most {size_text(most)} are taken: give a "
            "part of it, or start the app with a larger --max-upload"
        )


def text_of(content: bytes, name: str) -> str:
    """The text of a file, its line ends as ``\\n``.

    Raises:
        ValueError: no plain text by its name, not UTF-8, binary, or nothing in it.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{name} is a {suffix} file, and only plain text is read: save it as text (.txt), or "
            "copy its text into the box"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x}. Save "
            "it as UTF-8, as with iconv -f latin1 -t utf-8, or copy its text into the box"
        ) from error
    if "\0" in text:
        raise ValueError(
            f"{name} has null characters in it, so it is no plain text: save it as text (.txt) in "
            "UTF-8, or copy its text into the box"
        )
    return checked(text, name)


def checked(text: str, name: str) -> str:
    """``text`` with line ends as ``\\n``; ValueError where nothing is in it."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise ValueError(f"{name} is empty: choose a file with text in it, or paste a text")
    # From a form a lone surrogate can come, which no tokenizer takes.
    return text.encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    """``text`` with characters that hide, or turn the direction of others, as their numbers."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    # Joiners make one sign of several, as in emoji and Indic scripts.
    if character in "\u200c\u200d":
        return character
    return f"‹U+{ord(character):04X}›"


def size_text(count: int) -> str:
    """Bytes in MB, or in KB where they are few."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} KB"
