"""Saved caches that were damaged, or crafted: what may be done to one, by name.

Damage leaves checksums as they were; who crafts a file makes them anew. Each mutation changes the
folder of a saved cache, given a source of chance and, for some, another cache of the same form.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .saved_files import read_saved, saved_file, write_saved

DESCRIPTION = "cache.json"
Tensors = dict[str, torch.Tensor]
Damage = Callable[[random.Random, Path, Path], None]
Craft = Callable[[random.Random, Tensors, dict[str, Any]], None]

VALUES: list[Any] = [
    *(None, 0, -1, 1, 10**9, 2**62, 2**70, 1e308, 0.5, True, False, "x", "", "../../x"),
    *([], {}, [1], [[]], {"a": 1}, "float8_e4m3fn", float("inf"), -0.0),
]
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
HUGE: list[Any] = [10**400, -(10**400), [2**40, 2**40], [float("inf")], [1e308] * 16]
NUMBERS = [0, 1, -1, -2, 5, 39, 41, 100, 1000, 65535, 10**6, 2**31 - 1, 2**31, 2**40, -(2**40)]


def truncated(chance: random.Random, folder: Path, other: Path) -> None:
    _cut(chance, saved_file(folder))


def truncated_description(chance: random.Random, folder: Path, other: Path) -> None:
    _cut(chance, folder / DESCRIPTION)


def _cut(chance: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size - 1)])


def flipped_header(chance: random.Random, folder: Path, other: Path) -> None:
    path = saved_file(folder)
    _flip(chance, path, 0, _body(path), chance.choice([1, 1, 3]))


def flipped_body(chance: random.Random, folder: Path, other: Path) -> None:
    path = saved_file(folder)
    _flip(chance, path, _body(path), path.stat().st_size, chance.choice([1, 1, 4, 64]))


def flipped_description(chance: random.Random, folder: Path, other: Path) -> None:
    path = folder / DESCRIPTION
    _flip(chance, path, 0, path.stat().st_size, 1)


def _flip(chance: random.Random, path: Path, start: int, end: int, count: int) -> None:
    content = bytearray(path.read_bytes())
    for place in chance.sample(range(start, end), count):
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _body(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def zeroed(chance: random.Random, folder: Path, other: Path) -> None:
    path = saved_file(folder)
    content = bytearray(path.read_bytes())
    start = chance.randrange(_body(path), len(content) - 1)
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def longer(chance: random.Random, folder: Path, other: Path) -> None:
    path = saved_file(folder)
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.choice([1, 8, 4096])))


def header_length(chance: random.Random, folder: Path, other: Path) -> None:
    path = saved_file(folder)
    content = path.read_bytes()
    lengths = [0, 1, 2**31, 2**63, 2**64 - 1, len(content), len(content) - 8, 99_999_999]
    path.write_bytes(chance.choice(lengths).to_bytes(8, "little") + content[8:])


def tensors_of_another(chance: random.Random, folder: Path, other: Path) -> None:
    shutil.copy(saved_file(other), saved_file(folder))


def description_of_another(chance: random.Random, folder: Path, other: Path) -> None:
    shutil.copy(other / DESCRIPTION, folder / DESCRIPTION)


def no_file(chance: random.Random, folder: Path, other: Path) -> None:
    path = chance.choice([saved_file(folder), folder / DESCRIPTION])
    path.unlink()
    kind = chance.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.write_bytes(b"")
    elif kind == 4:
        path.write_bytes(chance.randbytes(5000))


def strange_json(chance: random.Random, folder: Path, other: Path) -> None:
    path = folder / DESCRIPTION
    text = path.read_text()
    version = '"format_version": 3'
    assert version in text
    path.write_bytes(
        chance.choice(
            [
                lambda: b"[" * 200_000,
                lambda: b'{"a":' * 100_000,
                lambda: text.replace(version, '"format_version": ' + "9" * 5000).encode(),
                lambda: text.replace(version, '"format_version": NaN').encode(),
                lambda: text.replace(version, f'{version}, "format_version": 1').encode(),
                lambda: (text.rstrip()[:-1] + ', "x": [' + "0," * 10**6 + "0]}").encode(),
                lambda: b"\xff\xfe" + text.encode(),
                lambda: b"\xef\xbb\xbf" + text.encode(),
                lambda: text.encode("utf-16"),
            ]
        )()
    )


def edited_description(chance: random.Random, folder: Path, other: Path) -> None:
    """As by hand: a value is another one, the checksum is not."""
    path = folder / DESCRIPTION
    content = json.loads(path.read_text())
    places = [content["options"], content["model"], content["library"], content]
    place = chance.choice(places)
    name = chance.choice([name for name in place if name != "checksum"])
    place[name] = chance.choice([value for value in VALUES if value != place[name]])
    path.write_text(json.dumps(content))


DAMAGES: list[Damage] = [
    *(truncated, truncated_description, flipped_header, flipped_body, flipped_body),
    *(flipped_description, zeroed, longer, header_length, tensors_of_another),
    *(description_of_another, no_file, strange_json, edited_description),
]


def other_shape(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    if not tensor.ndim:
        tensors[name] = tensor.repeat(3)
        return
    dim = chance.randrange(tensor.ndim)
    tensors[name] = chance.choice(
        [
            lambda: tensor.narrow(dim, 0, max(0, tensor.shape[dim] - 1)),
            lambda: torch.cat([tensor, tensor], dim),
            lambda: tensor.narrow(dim, 0, 0),
            lambda: tensor.unsqueeze(dim),
            lambda: tensor.narrow(dim, 0, min(1, tensor.shape[dim])),
            lambda: tensor.flatten(),
        ]
    )()


def other_dtype(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    name = chance.choice(sorted(tensors))
    tensors[name] = tensors[name].to(chance.choice(DTYPES))


def not_finite(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    names = [name for name in tensors if tensors[name].is_floating_point()]
    tensor = tensors[chance.choice([name for name in names if tensors[name].numel()])].view(-1)
    numbers = [float("nan"), float("inf"), -float("inf"), torch.finfo(tensor.dtype).max]
    tensor[chance.randrange(len(tensor))] = chance.choice(numbers)


def other_numbers(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    whole = [name for name, x in tensors.items() if not x.is_floating_point() and x.numel()]
    tensor = tensors[chance.choice([name for name in whole if tensors[name].dtype != torch.bool])]
    limits = torch.iinfo(tensor.dtype)
    number = max(limits.min, min(limits.max, chance.choice([*NUMBERS, limits.min, limits.max])))
    count = chance.choice([1, tensor.numel()])
    start = chance.randrange(tensor.numel() - count + 1)
    tensor.view(-1)[start : start + count] = number


def other_scalar(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    tensor = tensors[chance.choice([name for name, x in tensors.items() if 0 < x.numel() <= 8])]
    limit = 1 << (8 * tensor.element_size() - 2)
    number = max(-limit, min(limit, chance.choice(NUMBERS)))
    tensor.view(-1)[chance.randrange(tensor.numel())] = number % 2 if limit < 256 else number


def missing(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    del tensors[chance.choice(sorted(tensors))]


def missing_in_all_layers(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    part = chance.choice(sorted(tensors)).split(".", 2)[-1]
    for name in [name for name in tensors if name.split(".", 2)[-1] == part]:
        del tensors[name]


def unknown(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    names = ["../../evil", "layers.0.evil", "layers.99.window.keys", "layers.0.index.../x"]
    names += ["/etc/passwd", "layers.0.window.evil", "layers.0.store.evil", "layers.-1.built"]
    tensors[chance.choice([*names, "layers.00.built", "tokens", ""])] = torch.zeros(3)


def swapped(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    one, two = chance.sample(sorted(tensors), 2)
    tensors[one], tensors[two] = tensors[two], tensors[one]


def renamed(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    name = chance.choice(sorted(tensors))
    new = chance.choice(["layers.0.x", name + "x", name.replace("0", "1", 1), name.upper()])
    tensors[new] = tensors.pop(name)


def version(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    content["format_version"] = chance.choice([0, 2, 4, "2", 1.0, True, None, [], {}, -1, 10**30])


def option(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    content["options"][chance.choice(sorted(content["options"]))] = chance.choice(VALUES)


def unknown_option(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    content["options"][chance.choice(["evil", "__class__", "__init__", "replace"])] = 1


def model(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    content["model"][chance.choice(sorted(content["model"]))] = chance.choice(VALUES)


def layers(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    every = content["layers"]
    number = chance.randrange(len(every))
    one = every[number]
    kind = chance.randrange(7)
    if kind == 0:
        one["type"] = chance.choice([*VALUES, "DynamicLayer"])
    elif kind == 1:
        one["values"] = chance.choice(VALUES)
    elif kind == 2:
        every.pop(number)
    elif kind == 3:
        every.append(one)
    elif kind == 4:
        every[number] = chance.choice(VALUES)
    elif kind == 5:
        one["values"][chance.choice(["evil", "__class__", "update", "keys"])] = 1
    elif one["values"]:
        one["values"][chance.choice(sorted(one["values"]))] = chance.choice(VALUES)


def top(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    content[chance.choice(sorted(set(content) - {"tensors", "files"}))] = chance.choice(VALUES)


def method(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    names = ["paris", "flat", "h2o", "lrqk", "ctkvr", "FLAT"]
    content["method"] = chance.choice([*VALUES, *names])


def deep(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    """Another value, or none, somewhere inside what else a description says."""
    names = ["identity", "identity", "tokens", "tokens", "options", "model", "library"]
    node = content[chance.choice([name for name in names if content[name]])]
    if node is content["tokens"] and chance.random() < 0.7:
        node["passes"] = [[0, 3, "0" * 64]] * chance.choice([1, 2])
    while True:
        place = chance.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
        if node[place] and isinstance(node[place], dict | list) and chance.random() < 0.8:
            node = node[place]
        elif chance.random() < 0.1:
            del node[place]
            return
        else:
            node[place] = chance.choice([*VALUES, *HUGE])
            return


def other_ids(chance: random.Random, tensors: Tensors, content: dict[str, Any]) -> None:
    """Other tokens than those that filled it."""
    ids = tensors["tokens.ids"].clone()
    kind = chance.randrange(4)
    if kind == 0:
        ids = ids[: chance.randrange(3), : chance.randrange(ids.shape[1])]
    elif kind == 1:
        ids = ids.repeat(chance.choice([1, 2]), 2)
    else:
        numbers = [-1, -2, -3, 0, 127, 128, 10**6, 2**31 - 1, -(2**31)]
        start = chance.randrange(ids.shape[1])
        ids[chance.randrange(len(ids)) :, start:] = chance.choice(numbers)
    tensors["tokens.ids"] = ids


CRAFTS: list[Craft] = [
    *(deep, deep, deep, other_ids),
    *(other_shape, other_shape, other_shape, other_dtype, other_dtype, not_finite, other_numbers),
    *(other_numbers, other_scalar, other_scalar, missing, missing_in_all_layers, unknown, swapped),
    *(swapped, renamed, version, option, option, unknown_option, model, layers, layers, top),
    *(method,),
]


def checksums(chance: random.Random, folder: Path) -> None:
    """Make other entries of tensors, or of files, with the checksum of the description right."""
    content, _ = read_saved(folder)
    tensors = content["tensors"]
    name = chance.choice(sorted(tensors))
    kind = chance.randrange(5)
    if kind == 0:
        tensors[name] = chance.choice(["", "0", "00000000", "x" * 8, *VALUES])
    elif kind == 1:
        tensors[name + "x"] = tensors.pop(name)
    elif kind == 2:
        del tensors[name]
    elif kind == 3:
        bad = ["../x", "/etc/passwd", "cache-.safetensors", "cache.json", "cache-0123456789ab.x"]
        content["files"] = chance.choice([[], content["files"] * 2, [chance.choice(bad)], *VALUES])
    else:
        tensors[name], other = tensors[chance.choice(sorted(tensors))], tensors[name]
        tensors[name + "y"] = other
    write_saved(folder, content)


def header(chance: random.Random, folder: Path) -> None:
    """Claim another shape, dtype or place of a tensor in the header of the file."""
    path = saved_file(folder)
    start, content = _body(path), path.read_bytes()
    values = json.loads(content[8:start])
    entry = values[chance.choice(sorted(set(values) - {"__metadata__"}))]
    sizes = [0, 1, 2, 2**20, 2**31, 2**32, 2**40, 2**47, 2**48, 2**62, 2**63, -1, 1.5]
    kind = chance.randrange(3)
    if kind == 0:
        entry["shape"] = [chance.choice(sizes) for _ in range(chance.randrange(70))]
    elif kind == 1:
        entry["dtype"] = chance.choice(["F64", "I8", "BOOL", "F8_E4M3", "U64", "F4", "C64", 3])
    else:
        entry["data_offsets"] = [chance.choice(sizes), chance.choice(sizes)]
    text = json.dumps(values).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


IN_FOLDER = [checksums, header]


def craft(chance: random.Random, folder: Path, mutation: Craft) -> None:
    """Apply ``mutation`` and write the cache again, checksums and all."""
    content, tensors = read_saved(folder)
    mutation(chance, tensors, content)
    write_saved(folder, content, tensors)
