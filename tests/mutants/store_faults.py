"""Faults in the stores and in saved caches."""

from __future__ import annotations

from fault import Fault

FAULTS = (
    Fault(
        "wrong-page",
        "hf_kvret/stores/paged.py",
        "first = sum(len(other) for other in self._chunks[:-1]) + start",
        "first = sum(len(other) for other in self._chunks[:-1])",
    ),
    Fault(
        "cropped-page-written-on",
        "hf_kvret/stores/paged.py",
        "self.length, self._tail = length, None",
        "self.length = length",
    ),
    Fault(
        "fork-writes-the-shared-page",
        "hf_kvret/stores/paged.py",
        "twin.length, twin._key_dim = self.length, self._key_dim",
        "twin.length, twin._key_dim, twin._tail = self.length, self._key_dim, self._tail",
    ),
    Fault(
        "slot-of-a-dropped-token-kept",
        "hf_kvret/stores/resident.py",
        "mask = self._token >= length",
        "mask = self._token > length",
    ),
    Fault(
        "damaged-tensor-accepted",
        "hf_kvret/saved/shards.py",
        "if checksum(name, tensor) != self._checksums[name]:",
        "if not checksum(name, tensor):",
    ),
    Fault(
        "unfinished-files-of-broken-saves-stay",
        "hf_kvret/saved/folder.py",
        "if path.name not in self._named and (is_ours or unfinished.fullmatch(path.name)):",
        "if path.name not in self._named and is_ours:",
    ),
    Fault(
        "ids-behind-the-last-token",
        "hf_kvret/stores/paged.py",
        "                self._value_in_key,\n                self.length,\n",
        "                self._value_in_key,\n                None,\n",
    ),
)
