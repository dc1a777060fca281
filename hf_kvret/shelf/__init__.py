"""Caches of prompts on disk, found by what they begin with."""

from hf_kvret.shelf.entry import ShelfEntry
from hf_kvret.shelf.questions import ask, document_ids
from hf_kvret.shelf.shelf import Shelf

__all__ = ["Shelf", "ShelfEntry", "ask", "document_ids"]
