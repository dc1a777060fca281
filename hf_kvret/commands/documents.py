"""``hf-kvret read``, ``hf-kvret ask`` and ``hf-kvret shelf``."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.signals import SIGNALS_WAIT
from hf_kvret.generate.chunks import recurs
from hf_kvret.lab.evaluate.bundled import default_model
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.program.arguments import DTYPES, check_device, file_path, whole_number
from hf_kvret.lab.program.options import count_option, device_option, dtype_option, option
from hf_kvret.lab.program.program import add_command
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.models.versions import as_argument
from hf_kvret.registry import registered_methods
from hf_kvret.saved.description import verify_cache
from hf_kvret.saved.identity import printable
from hf_kvret.shelf import Shelf, ask, document_ids
from hf_kvret.shelf.entry import BLOCK
from hf_kvret.shelf.questions import positions
from hf_kvret.shelf.shelf import can_crop
from hf_kvret.stores.placement import CODED

_FOLDER = Path("~/.cache/hf_kvret/shelf")
_CHUNK = 2048
# A cache takes a shorter chunk for drafted tokens.
_LEAST_CHUNK = 512
_NO_TEXT = (".pdf", ".doc", ".docx", ".odt", ".epub", ".rtf", ".html", ".htm", ".xhtml")
_OF_SHELF = ("list", "inspect", "verify", "remove")


def _shelf_option() -> Any:
    return option(_FOLDER, "its folder", kind=Path, metavar="DIR")


@dataclass(frozen=True)
class ReadOptions:
    """Read a document into a cache and put it on a shelf.

    From there hf-kvret ask, or any call of generate with that shelf, goes on. After Ctrl-C the
    same command goes on behind the last chunk; where the model's layers can't go back to it, it
    begins again.
    """

    document: Path = option(
        help="a text or Markdown file, or - for a pipe", kind=file_path, name="document"
    )
    model: str = option(
        default_model(), "a folder or a hub id; reference and smollm2 are small test models"
    )
    method: str = option("paris", "and its options after colons, as paris:top_k=256")
    shelf: Path = _shelf_option()
    name: str | None = option(None, "to ask by; the file's unless given, of a pipe stdin")
    max_size: str | None = option(
        None, "of all that is on the shelf; default: half of what its disk has", metavar="SIZE"
    )
    dtype: str = dtype_option()
    device: str = device_option()


@dataclass(frozen=True)
class AskOptions:
    """Load what hf-kvret read has read, and answer one question about it."""

    name: str = option(help="of what was read", name="name")
    question: str = option(help="in quotes", name="question")
    shelf: Path = _shelf_option()
    model: str | None = option(None, "where it is now; where it was unless given")
    top_k: int | None = option(None, "tokens to retrieve", kind=whole_number(1))
    new_tokens: int = count_option(512, "of the answer at most")
    device: str = device_option()


@dataclass(frozen=True)
class ShelfOptions:
    """Say what is on a shelf, check the files of an entry byte by byte, or remove it."""

    action: str = option(help=", ".join(_OF_SHELF), choices=_OF_SHELF, name="action")
    name: str | None = option(None, "or title of an entry, but for list")
    shelf: Path = _shelf_option()


def add_document_parsers(commands: Any) -> None:
    """Add ``read``, ``ask`` and ``shelf`` to the program."""
    add = partial(add_command, commands)
    add("read", ReadOptions, run_read, help="read a document once and keep it on a shelf")
    add("ask", AskOptions, run_ask, help="ask a question to a document on a shelf")
    add("shelf", ShelfOptions, run_shelf, help="list, check or remove what is on a shelf")


def run_read(options: ReadOptions) -> int:
    """Read a document as the command line says."""
    text = document_text(options.document)
    choice = choose_cache(options.method)
    if choice.options is None:
        raise ValueError(f"--method {options.method}: only caches of hf-kvret go on a shelf")
    shelf = Shelf(options.shelf, options.max_size)
    check_device(options.device)
    subject = load_subject(options.model, DTYPES[options.dtype], options.device)
    ids = document_ids(subject.need_tokenizer("read"), text).to(subject.device)
    if ids.shape[1] < BLOCK:
        raise ValueError(
            f"{options.document} has {ids.shape[1]} tokens, and a shelf holds {BLOCK} and more: "
            "put the text into the question"
        )
    _check_positions(subject, ids.shape[1])
    name = options.name or ("stdin" if is_stream(options.document) else options.document.stem)
    wanted = ids, subject.model, choice.method
    there = shelf.has(*wanted, **asdict(choice.options))
    if there is not None and there.title == name:
        print(f"all {there.tokens:,} tokens are on {printable(str(options.shelf))} already")
        return 0
    found = shelf.find(*wanted, **asdict(choice.options))
    method = registered_methods()[choice.method]
    cache = method(subject.model.config, choice.options) if found is None else found
    shelf.check_writable()
    started = time.perf_counter()
    try:
        _read(subject, cache, ids, name, shelf)
        seconds = time.perf_counter() - started
        entry = shelf.put(cache, ids, subject.model, name)
    except KeyboardInterrupt:
        _keep_part(shelf, cache, ids, subject)
        raise
    new = ids.shape[1] - cache.from_shelf
    print(
        f"read {new:,} of {entry.tokens:,} tokens in {seconds:.1f} s; {entry.nbytes / 1e9:.2f} GB "
        f"on {printable(str(options.shelf))}\n\n    "
        f'hf-kvret ask {_word(name)} "..." --shelf {_word(str(options.shelf))}'
    )
    return 0


def _word(text: str) -> str:
    """``text`` as a shell and a terminal take it."""
    return shlex.quote(printable(text))


def _check_positions(subject: Subject, tokens: int, new: int = 0) -> None:
    """Say that ``tokens``, and ``new`` ones of an answer, go beyond the positions of the model.

    ValueError where it can't go on there.
    """
    most, is_table = positions(subject.model)
    if not most or tokens + new <= most:
        return
    fact = f"{tokens:,} tokens" + (f" and up to {new:,} of an answer" if new else "")
    fact += f", and the model has {most:,} positions (max_position_embeddings)"
    if is_table and tokens > most:
        raise ValueError(f"{fact}, which end there: give a part of the document, or another model")
    rest = "the answer ends there" if is_table else "what lies behind them it may not understand"
    print(f"warning: {fact}: {rest}", file=sys.stderr)


def document_text(path: Path) -> str:
    """The text of a file or a pipe; ``-`` is standard input. No host is asked for anything.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another format than text, not UTF-8, or without text.
    """
    name = printable(str(path))
    if not is_stream(path) and not path.is_file():
        raise FileNotFoundError(f"no file {name}: give a text or Markdown file, or a pipe")
    if path.suffix.lower() in _NO_TEXT:
        raise ValueError(f"{name} is no plain text: save it as text or Markdown")
    content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text ({error}): save it as UTF-8, as with iconv -f latin1 -t utf8"
        ) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text or not text.strip():
        raise ValueError(f"{name} has no text in it, or null characters")
    return text


def is_stream(path: Path) -> bool:
    """Whether a document comes from standard input, a pipe or a device, so that it has no name."""
    return str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir())


@torch.no_grad()
def _read(
    subject: Subject, cache: RetrievalCache, ids: torch.Tensor, name: str, shelf: Shelf
) -> None:
    """Read what ``cache`` lacks of ``ids [1, T]``; ValueError where ``shelf`` is too small."""
    start, model = cache.get_seq_length(), subject.model
    if recurs(cache):
        # Some of these models don't go on from their state.
        model(ids[:, start:], **as_argument(cache), use_cache=True, logits_to_keep=1)
        return
    chunks = list(ids[:, start:].split(_CHUNK, dim=1))
    if len(chunks) > 1 and chunks[-1].shape[1] < _LEAST_CHUNK:
        chunks[-2:] = [torch.cat(chunks[-2:], dim=1)]
    cache.expect(ids.shape[1] - start, max(chunk.shape[1] for chunk in chunks))
    bar = {"desc": name, "unit": "tok", "unit_scale": True, "total": ids.shape[1]}
    # A signal waits for the end where a broken pass can't be dropped, or rows were coded twice.
    goes_back = can_crop(cache, ids.shape[1]) and cache.options.store not in CODED
    one_pass = nullcontext() if goes_back else SIGNALS_WAIT
    with tqdm(initial=start, delay=1.0, **bar) as shown:
        for chunk in chunks:
            with one_pass:
                model(chunk, **as_argument(cache), use_cache=True, logits_to_keep=1)
            shown.update(chunk.shape[1])
            if chunk is chunks[0]:
                shelf.check_room(cache, ids.shape[1])


def _keep_part(shelf: Shelf, cache: RetrievalCache, ids: torch.Tensor, subject: Subject) -> None:
    """Put what was read before an interrupt, without the pass that broke off."""
    try:
        cache.crop(0)
        length = cache.get_seq_length()
        if length < BLOCK:
            raise ValueError(f"{length} tokens were read, and a shelf holds {BLOCK} and more")
        entry = shelf.put(cache, ids[:, :length], subject.model)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"\nnothing was kept, the same command begins again: {error}", file=sys.stderr)
    else:
        print(f"\n{entry.tokens:,} tokens were kept: the same command goes on", file=sys.stderr)


def run_ask(options: AskOptions) -> int:
    """Answer a question as the command line says."""
    shelf = Shelf(options.shelf)
    entry = shelf.entry(options.name)
    twins = [one.name for one in shelf.entries() if one.title == entry.title != ""]
    if len(twins) > 1:
        print(
            f"{len(twins)} documents are called {printable(entry.title)}: this is {entry.name}, "
            f"the last that was read or asked, of {', '.join(twins)}",
            file=sys.stderr,
        )
    check_device(options.device)
    if options.model is None and not entry.model:
        raise ValueError(
            f"nobody wrote down where the model of {printable(options.name)} is: give --model"
        )
    subject = load_subject(options.model or entry.model, DTYPES[entry.dtype], options.device)
    tokenizer = subject.need_tokenizer("ask")
    changes = {} if options.top_k is None else {"top_k": options.top_k}
    cache = shelf.load(entry.name, subject.model, **changes)
    asked = len(tokenizer(options.question, add_special_tokens=False)["input_ids"])
    _check_positions(subject, entry.tokens + asked, options.new_tokens)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    more: dict[str, Any] = {"max_new_tokens": options.new_tokens, "streamer": streamer}
    ask(subject.model, tokenizer, cache, options.question, **more)
    return 0


def run_shelf(options: ShelfOptions) -> int:
    """Say what is on a shelf, check it or remove it."""
    shelf = Shelf(options.shelf)
    if options.action == "list":
        print(_table(shelf))
        return 0
    if options.name is None:
        raise ValueError(f"shelf {options.action}: give --name, as hf-kvret shelf list has it")
    if options.action == "remove":
        # A damaged one has no facts.
        shelf.remove(options.name)
        lines = [f"removed {options.name}"]
    else:
        entry = shelf.entry(options.name)
        folder = shelf.folder / entry.name
        if options.action == "verify":
            lines = verify_cache(folder)
        else:
            facts = asdict(entry) | {"folder": folder}
            # Hashes are for the shelf.
            lines = [f"{name}: {x}" for name, x in facts.items() if name not in ("key", "chain")]
    print("\n".join(map(printable, lines)))
    return 0


def _table(shelf: Shelf) -> str:
    """A line for each entry."""
    rows = [
        (
            *(entry.title or "-", entry.name, entry.method, entry.model or "-"),
            *(f"{entry.tokens:,}", f"{entry.nbytes / 1e9:.2f}"),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)),
        )
        for entry in shelf.entries()
    ]
    header = ("title", "name", "method", "model", "tokens", "GB", "last used")
    return markdown_table(header, rows) if rows else f"nothing is on {printable(str(shelf.folder))}"
