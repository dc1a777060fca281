"""The compiled library of the CPU kernels: finding it, loading it, calling it."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from hf_kvret_kernels._dispatch import DenseCall, preferred
from hf_kvret_kernels.paged import HostRows

FILE_NAME = "libhf_kvret_host.so"
# Names a library file to load in place of the installed one.
PATH_VARIABLE = "HF_KVRET_HOST_LIBRARY"
# Names the instruction set to use where a call asks for none, one of PATHS.
ISA_VARIABLE = "HF_KVRET_CPU_PATH"
VERSION = 24

# Instruction sets that the library has code for, best first, with its numbers for them.
PATHS = {"avx512_bf16": 3, "avx512": 2, "avx2": 1, "neon": 4, "portable": 0}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Not every system can tell which processors a process may use.
_affinity = getattr(os, "sched_getaffinity", None)
PROCESSORS = len(_affinity(0)) if _affinity else os.cpu_count() or 1
"""Processors that the process might use when this was imported."""
_AUTO = -1
_NO_MEMORY = 1
_NO_PATH = 2
BAD_ID = 4

# hfk_request of csrc/hf_kvret_host.h: seven addresses, fourteen sizes, scale and softcap; dtype,
# path, threads and whether rows are in files. Packed in one call: to fill a ctypes.Structure field
# by field takes so long that it shows where few rows are read.
_REQUEST = struct.Struct("@7P14q2d4i")
# hfk_prompt: eight addresses, nineteen numbers, scale and softcap, causal, dtype, path and threads.
_PROMPT = struct.Struct("@8P19q2d4i")
# hfk_coding: three addresses, the group, bits and a reserved number.
_CODING = struct.Struct("@3Pq2i")
# hfk_codes: six addresses, hfk_coding, five sizes, and dtype, path, threads and a reserved number.
_CODES = struct.Struct("@6P3Pq2i5q4i")
# hfk_ranking: three addresses, six sizes, threads and path.
_RANKING = struct.Struct("@3P6q2i")
# hfk_product: four addresses, three sizes, and dtype, path, threads and a reserved number.
_PRODUCT = struct.Struct("@4P3q4i")
# hfk_paris_encoding: five addresses, seven sizes, seven strides; dtype, path, threads, reserved.
_PARIS_ENCODING = struct.Struct("@5P13q4i")


def attend(
    query: torch.Tensor, rows: HostRows, ids: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``gather_attention``; the caller checked the arguments."""
    out = query.new_empty(*query.shape[:3], rows.value_dim, dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    run("hfk_attend", query, rows, ids, out, lse, scale, softcap)
    return out, lse


def score(
    query: torch.Tensor, rows: HostRows, ids: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """See ``gather_scores``; the caller checked the arguments."""
    scores = query.new_empty(*query.shape[:3], ids.shape[3], dtype=torch.float32)
    run("hfk_scores", query, rows, ids, scores, None, scale, softcap)
    return scores


def run(
    function: Literal["hfk_attend", "hfk_scores"],
    query: torch.Tensor,
    rows: HostRows,
    ids: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    """Write the result of a library function into ``out`` and ``lse``, both fp32 and contiguous.

    The arguments were checked by the caller. Other Python threads run meanwhile.

    Raises:
        WrongIdError: an id of no token; ``out`` and ``lse`` may hold anything then.
        ValueError: a table entry that an id leads to names no page.
        MemoryError: no room for the work space.
        RuntimeError: the library is of another build.
    """
    # These must live until the call is over: the request has only their addresses.
    query, ids, threads = query.contiguous(), ids.contiguous(), thread_count()
    table, pages = rows.table.contiguous(), rows.addresses().contiguous()
    where = (table, pages, rows.page_len, rows.token_count, rows.in_files)
    sizes = (rows.heads, rows.value_dim, rows.width, rows.value_start)
    request = pack_request(
        query, ids, where, sizes, out, lse, scale, softcap, threads, rows.coding_address
    )
    if call(function, threads, request) == BAD_ID:
        rows.check_range(ids)
        raise RuntimeError(
            "ids or page table changed while they were read: do not write to them in another thread"
        )


def pack_request(
    query: torch.Tensor,
    ids: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor, int, int, bool] | None,
    sizes: tuple[int, int, int, int],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    threads: int,
    coding_address: int = 0,
) -> bytes:
    """``hfk_request`` of contiguous tensors, which must live until the call is over.

    ``pages``: table, addresses, page length, number of tokens, and whether they lie in files; None
    where there are no rows. ``sizes``: KV heads, value dim, numbers of a row, and where in it the
    value begins. ``coding_address``: of ``hfk_coding``, for coded rows.
    """
    table, addresses, page_len, tokens, in_files = pages or (None, None, 1, 0, False)
    batch, query_heads, queries, key_dim = query.shape
    return _REQUEST.pack(
        *map(_address, (query, ids, table, addresses, out, lse)),
        coding_address,
        batch,
        query_heads,
        ids.shape[1],
        sizes[0],
        queries,
        ids.shape[3],
        key_dim,
        sizes[1],
        0 if table is None else table.shape[1],
        page_len,
        0 if addresses is None else addresses.shape[0],
        tokens,
        *sizes[2:],
        scale,
        softcap or 0.0,
        DTYPES[query.dtype],
        path_in_use(),
        threads,
        in_files,
    )


def _address(tensor: torch.Tensor | None) -> int:
    """The address of its first number; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def pack_coding(
    grid: torch.Tensor, signs: torch.Tensor, bits: int, key_mean: torch.Tensor | None = None
) -> bytes:
    """``hfk_coding`` of ``grid [4^bits, 2]``, ``signs [group]`` and a ``CodedRows.key_mean``.

    All are fp32 and contiguous, and must live as long as it is used.
    """
    return _CODING.pack(*map(_address, (grid, signs, key_mean)), len(signs), bits, 0)


# Cells and points of hfk_near_points.
_NEAR_SHAPE = (256, 256, 4)


def near_points(grid: torch.Tensor) -> torch.Tensor:
    """``near`` of ``hfk_codes`` for ``grid [n, 2]`` fp32, contiguous."""
    near = torch.empty(_NEAR_SHAPE, dtype=torch.uint8, device="cpu")
    status = load().hfk_near_points(grid.data_ptr(), len(grid), near.data_ptr())
    if status:
        raise RuntimeError(_refusal("hfk_near_points", status))
    return near


def run_codes(
    function: Literal["hfk_encode", "hfk_decode"],
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    coding: bytes,
    added: torch.Tensor | None = None,
    tables: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Write codes and scales, uint8 ``[n, bytes]``, of ``rows [n, W]``, or rows of these.

    All are contiguous, or codes and scales that are decoded each row by itself.

    ``coding`` is of ``pack_coding``. To decode, each row of ``added [m, W]`` fp32, contiguous, is
    added to ``n / m`` rows in turn. To encode, ``tables`` are ``[4^bits, 4]`` fp32 of x, y and half
    the square of each point of the grid, and 0; and ``near_points`` of the grid.
    """
    threads = thread_count()
    work = _CODES.pack(
        *map(_address, (rows, codes, scales, added, *tables)),
        *_CODING.unpack(coding),
        *rows.shape,
        codes.stride(0),
        scales.stride(0),
        1 if added is None else max(1, len(rows) // len(added)),
        DTYPES[rows.dtype],
        path_in_use(),
        threads,
        0,
    )
    call(function, threads, work)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x [.., K]`` times ``weight [N, K]`` plus ``bias [N]``, of one dtype: ``[.., N]``.

    The weight is contiguous. Sums are fp32, and the weight is read once for all tokens.
    Errors as of ``run``, but for wrong ids.
    """
    x, threads = x.contiguous(), thread_count()
    bias = None if bias is None else bias.contiguous()
    outputs, depth = weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    addresses = map(_address, (x, weight, bias, out))
    sizes = x.numel() // depth, outputs, depth
    work = _PRODUCT.pack(*addresses, *sizes, DTYPES[x.dtype], path_in_use(), threads, 0)
    call("hfk_run_product", threads, work)
    return out


def rank(scores: torch.Tensor, ids: torch.Tensor, best: torch.Tensor) -> None:
    """Write the best ids into ``best [B, H, Q, k]`` int32, contiguous.

    ``scores [B, Hq, Q, K]`` fp32; ``ids [B, H, Q, K]`` int32. Errors as of ``run``.
    """
    scores, ids, threads = scores.contiguous(), ids.contiguous(), thread_count()
    batch, heads, queries, count = ids.shape
    addresses = map(_address, (scores, ids, best))
    sizes = (batch, scores.shape[1], heads, queries, count, best.shape[3])
    call("hfk_rank", threads, _RANKING.pack(*addresses, *sizes, threads, path_in_use()))


def encode_paris(
    keys: torch.Tensor,
    signs: torch.Tensor,
    levels: torch.Tensor,
    planes: tuple[torch.Tensor, torch.Tensor],
    stride: int,
) -> None:
    """Write ParisKV's codes into ``planes``: sign and record of ``ParisCodes``.

    ``stride`` is ``rotation_stride``. The arguments were checked by the caller; errors as of
    ``run``, but for wrong ids.
    """
    if keys.stride(3) != 1:
        keys = keys.contiguous()
    signs, levels, threads = signs.contiguous(), levels.contiguous(), thread_count()
    tensors = (keys, signs, levels, *planes)
    request = _PARIS_ENCODING.pack(
        *map(_address, tensors),
        *(*keys.shape, len(signs), stride),
        *keys.stride()[:3],
        *(step for plane in planes for step in plane.stride()[:2]),
        *(DTYPES[keys.dtype], path_in_use(), threads, 0),
    )
    call("hfk_paris_encode", threads, request)


def attend_prompt(dense: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``prompt_attention``; ``out`` is fp32. The arguments were checked by the caller.

    Errors as of ``run``, but for wrong ids.
    """
    query, shape = dense.query, dense.query.shape[:3]
    out = query.new_empty(*shape, dense.value.shape[3], dtype=torch.float32)
    lse = query.new_empty(shape, dtype=torch.float32)
    _run_prompt(dense, None, out, lse, None, 0)
    return out, lse


def sum_blocks(dense: DenseCall, positions: torch.Tensor, block: int) -> torch.Tensor:
    """See ``block_lse``; its caller checked the arguments. Errors as of ``attend_prompt``."""
    blocks = -(-dense.key.shape[2] // block)
    lse = dense.query.new_empty(*dense.query.shape[:3], blocks, dtype=torch.float32)
    if lse.numel():
        _run_prompt(dense, positions.contiguous(), None, None, lse, block)
    return lse


def _run_prompt(
    dense: DenseCall,
    positions: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    block_lse: torch.Tensor | None,
    block: int,
) -> None:
    """Call ``hfk_prompt_attention`` with its positions, results, and a block's length."""
    query, key, value, scale, causal_offset, valid, softcap = dense
    batch, query_heads, queries, key_dim = query.shape
    heads, tokens, value_dim = value.shape[1:]
    # It must live until the call is over, as all others do.
    valid = None if valid is None else valid.contiguous()
    threads = thread_count()
    request = _PROMPT.pack(
        *map(_address, (query, key, value, valid, positions, out, lse, block_lse)),
        block,
        *(batch, query_heads, heads, queries, tokens, key_dim, value_dim),
        *(stride for tensor in (query, key, value) for stride in tensor.stride()[:3]),
        tokens,
        causal_offset or 0,
        scale,
        softcap or 0.0,
        int(causal_offset is not None),
        DTYPES[query.dtype],
        path_in_use(),
        threads,
    )
    call("hfk_prompt_attention", threads, request)


@functools.cache
def path_number(name: str | None) -> int:
    """The library's number of an instruction set; of no name, that of the best.

    Raises:
        ValueError: it names no instruction set.
    """
    if not name:
        return _AUTO
    if name not in PATHS:
        raise ValueError(f"{ISA_VARIABLE}={name}: choose one of {', '.join(PATHS)}, or unset it")
    return PATHS[name]


def path_in_use() -> int:
    """``path_number`` of what the variable names."""
    return path_number(os.environ.get(ISA_VARIABLE))


def thread_count() -> int:
    """Torch's number of threads, but no more than the process has processors."""
    return min(torch.get_num_threads(), PROCESSORS)


def call(function: str, threads: int, *arguments: bytes | None) -> int:
    """0 or ``BAD_ID``; errors as of ``check`` for other statuses."""
    status = int(getattr(load(), function)(*arguments))
    if status:
        check(status, function, threads)
    return status


def check(status: int, function: str, threads: int) -> None:
    """An error for any ``status`` but 0 and ``BAD_ID``.

    Raises:
        ValueError: the variable names an instruction set that this processor lacks.
        MemoryError: no room for the work space.
        RuntimeError: the library is of another build.
    """
    if status == _NO_PATH:
        raise ValueError(
            f"this processor lacks the instructions of {ISA_VARIABLE}="
            f"{os.environ.get(ISA_VARIABLE)}: it has {', '.join(paths())}"
        )
    if status == _NO_MEMORY:
        raise MemoryError(
            f"no room for the work space of {threads} threads: free memory, or use fewer threads"
        )
    if status not in (0, BAD_ID):
        raise RuntimeError(_refusal(function, status))


def is_asked(backend: str, tensor: torch.Tensor) -> bool:
    """Whether ``backend`` means the library for a tensor.

    ``"cpp"`` does, ``"host"`` where there is a library, and ``"auto"`` as ``"host"`` on a CPU,
    unless another backend is preferred.

    Raises:
        ValueError: ``"cpp"`` or ``"host"`` for a tensor on another device.
    """
    if backend in ("cpp", "host") and not tensor.is_cpu:
        raise ValueError(
            f"backend={backend!r} with a tensor on {tensor.device}: the compiled library works on "
            "a CPU, leave backend out"
        )
    if backend == "auto" and (not tensor.is_cpu or preferred() is not None):
        return False
    return backend == "cpp" or (backend in ("auto", "host") and not why_not())


def paths() -> list[str]:
    """Instruction sets that this library and this processor have, best first."""
    library = load()
    return [name for name, number in PATHS.items() if library.hfk_has_path(number)]


def exponentials(numbers: torch.Tensor, path: str) -> torch.Tensor:
    """``exp`` of a contiguous 1D fp32 tensor of numbers <= 0, as the kernel of ``path`` has it."""
    out = torch.empty_like(numbers)
    status = load().hfk_exp(PATHS[path], numbers.data_ptr(), out.data_ptr(), len(numbers))
    if status != 0:
        raise RuntimeError(_refusal("hfk_exp", status))
    return out


def _refusal(function: str, status: int) -> str:
    """What a status means that arguments checked here can't cause."""
    return (
        f"{function} returned {status}: the library does not fit this package; unset "
        f"{PATH_VARIABLE}, and install hf_kvret again"
    )


def load() -> ctypes.CDLL:
    """The library.

    Raises:
        ImportError: it is not there or doesn't load; the message says what to do.
    """
    library = opened(os.environ.get(PATH_VARIABLE))
    if isinstance(library, str):
        raise ImportError(f"{library}; backend='naive' uses torch")
    return library


def why_not() -> str:
    """Why the library can't be used and what helps; empty where it can."""
    library = opened(os.environ.get(PATH_VARIABLE))
    return library if isinstance(library, str) else ""


@functools.cache
def opened(override: str | None) -> ctypes.CDLL | str:
    """The library, or why there is none. Looked for once for each value of the variable."""
    if override is not None:
        file = Path(override)
        remedy = f"correct or unset {PATH_VARIABLE}"
    else:
        library_path = next((place for place in _places() if place.is_file()), None)
        if library_path is None:
            return (
                "the CPU kernels are not compiled: hf_kvret was installed without a C++ compiler. "
                "Install one (GCC or Clang) and install hf_kvret again"
            )
        file, remedy = library_path, "install hf_kvret again, with a C++ compiler"
    try:
        library = ctypes.CDLL(str(file))
        version = library.hfk_version()
    except (OSError, AttributeError) as error:
        return f"{file} could not be loaded ({error}): {remedy}"
    if version != VERSION:
        return f"{file} has version {version}, this code needs {VERSION}: {remedy}"
    for name in (
        *("hfk_attend", "hfk_scores", "hfk_rank", "hfk_run_step"),
        *("hfk_prompt_attention", "hfk_run_product"),
        *("hfk_encode", "hfk_decode", "hfk_paris_encode"),
    ):
        getattr(library, name).argtypes = [ctypes.c_char_p]
    library.hfk_near_points.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.hfk_exp.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _places() -> Iterator[Path]:
    """Where the library may lie: beside this file, or in site-packages.

    The latter for an editable install, and for a copy of this package that came from the hub.
    """
    yield Path(__file__).with_name(FILE_NAME)
    for scheme in ("platlib", "purelib"):
        yield Path(sysconfig.get_path(scheme), "hf_kvret_kernels", FILE_NAME)
