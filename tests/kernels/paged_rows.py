"""Paged rows of random numbers, ids of some of them, queries, and attention in float64."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_kvret_kernels.higgs import CodedRows, HiggsCodec
from hf_kvret_kernels.paged import PagedRows, lay_apart

from .draws import attention64, draw

# What stands in table entries that no id leads to; as a page number it would crash.
NO_PAGE = 10**9
NEVER = float("-inf")
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
TWO_ROWS = [[0, 1, 2, 3], [7, 5, 8, 4]]


def code_rows(
    codec: HiggsCodec,
    sides: Sequence[torch.Tensor],
    table: torch.Tensor,
    *,
    chunks: tuple[int, ...] | None = None,
    value_dim: int | None = None,
    mean: torch.Tensor | None = None,
    tokens: int | None = None,
) -> CodedRows:
    """Pages ``[pages, Hkv, page_len, D]`` of keys and values, coded in torch.

    Keys alone have their values in them, of ``value_dim``. The rows lie beside the table.
    """
    parts = [codec.encode(side.contiguous(), backend="naive") for side in sides]
    rows = torch.cat([part.codes for part in parts] + [part.scales for part in parts], -1)
    code_bytes = sum(part.codes.shape[-1] for part in parts)
    pages = lay_apart(rows, code_bytes).to(table.device).split(chunks or (len(rows),))
    paged = PagedRows([*pages], table, code_bytes, apart=True, tokens=tokens)
    dims = sides[0].shape[-1], value_dim or sides[-1].shape[-1]
    return CodedRows(paged, codec, *dims, value_in_key=len(sides) == 1, key_mean=mean)


class Kind(NamedTuple):
    """How a store keeps rows.

    Attributes:
        dims: of keys and of values.
        bits: of a coded number; 16: rows are kept in full.
        group: coded numbers that share a scale.
        in_key: values are the first numbers of keys.
        offset: keys are coded around a mean of this size, another one for each batch row and head;
            then no page may be of two batch rows.
    """

    dims: tuple[int, int]
    bits: int = 16
    group: int = 8
    in_key: bool = False
    offset: float = 0.0

    def rows(
        self,
        device: str = "cpu",
        table: Sequence[Sequence[int]] = TWO_ROWS,
        chunks: tuple[int, ...] = (9,),
        *,
        kv_heads: int = 2,
        page_len: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[PagedRows | CodedRows, PagedRows]:
        """Random rows, and float64 rows of the keys and values that they stand for."""
        lead, (key_dim, value_dim) = (sum(chunks), kv_heads, page_len), self.dims
        keys = draw(*lead, key_dim, seed=sum(chunks), dtype=dtype).to(device)
        values = draw(*lead, value_dim, seed=key_dim, dtype=dtype).to(device)
        sides = [keys] if self.in_key else [keys, values]
        page_table = torch.tensor(table, dtype=torch.int32, device=device)
        if self.bits == 16:
            pages = torch.cat(sides, -1).split(chunks)
            within = value_dim * self.in_key
            rows = PagedRows([*pages], page_table, key_dim, value_in_key=within)
        else:
            codec, mean = HiggsCodec(self.bits, self.group), None
            if self.offset:
                mean = self.offset * draw(len(table), kv_heads, key_dim, seed=1).to(device)
            rows = code_rows(
                codec, sides, page_table, chunks=chunks, value_dim=value_dim, mean=mean
            )
            sides = [codec.decode(*codec.encode(x, "naive"), backend="naive") for x in sides]
            for batch_row, pages_of_row in enumerate(table if self.offset else ()):
                sides[0][pages_of_row] += mean[batch_row][:, None]
        plain = torch.cat([sides[0], sides[-1][..., :value_dim]], -1).double()
        return rows, PagedRows([*plain.split(chunks)], page_table, key_dim)


# With 3 bits and dims 8 and 16 a row has an odd number of bytes.
KINDS = {
    **{str(dims): Kind(dims) for dims in ((8, 8), (40, 24), (96, 128), (9, 5))},
    "keys alone": Kind((24, 16), in_key=True),
    "odd keys alone": Kind((17, 5), in_key=True),
    **{f"{bits} bits": Kind((64, 64), bits, 64) for bits in (2, 3, 4)},
    "3 bits, odd bytes": Kind((8, 16), 3, offset=3.0),
    "4 bits, groups": Kind((24, 16), 4, offset=3.0),
    "2 bits, whole rows": Kind((128, 128), 2, 128),
    "4 bits, keys alone": Kind((24, 16), 4, in_key=True),
}


def paged(
    device: str = "cpu",
    table: Sequence[Sequence[int]] | None = None,
    chunks: tuple[int, ...] = (9,),
    *,
    batch: int = 2,
    dims: tuple[int, int] = (16, 16),
    **sizes: Any,
) -> PagedRows:
    """Rows in full, as ``Kind.rows``; without a table each batch row shuffles all pages."""
    torch.manual_seed(sum(chunks) + sum(dims))
    if table is None:
        table = [torch.randperm(sum(chunks)).tolist() for _ in range(batch)]
    rows, _ = Kind(dims).rows(device, table, chunks, **sizes)
    assert isinstance(rows, PagedRows)
    return rows


def random_ids(
    rows: PagedRows, heads: int, queries: int, count: int, holes: float = 0.2
) -> torch.Tensor:
    """Distinct tokens ``[B, heads, queries, count]`` in random order, some of them -1."""
    batch, columns = rows.table.shape
    tokens = columns * rows.page_len
    order = torch.rand(batch, heads, queries, tokens).argsort(-1)[..., :count].int()
    order[torch.rand(order.shape) < holes] = -1
    return order.contiguous().to(rows.table.device)


def random_query(rows: PagedRows, heads: int, queries: int = 1) -> torch.Tensor:
    query = torch.randn(len(rows.table), heads, queries, rows.key_dim)
    return query.to(rows.table.device, rows.dtype)


def dense_rows(rows: PagedRows) -> torch.Tensor:
    """``[B, Hkv, n, width]`` on the CPU, in order; 0 where the table names no page."""
    pages, table = torch.cat([chunk.cpu() for chunk in rows.chunks]), rows.table.cpu().long()
    named = (table >= 0) & (table < len(pages))
    taken = pages[table.where(named, 0)] * named[:, :, None, None, None]
    return taken.transpose(1, 2).flatten(2, 3)


def chosen_rows(dense: torch.Tensor, ids: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, heads, Q, K, width]``: what ``ids [B, H, Q, K]`` name for each head; any rows for -1.

    ``dense [B, Hkv, n, width]``: head h reads the rows of KV head ``h // (heads // Hkv)``.
    """
    own = ids.cpu().long().clamp(min=0).repeat_interleave(heads // ids.shape[1], 1)
    batch, head = torch.arange(len(own)).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    return dense[batch, head // (heads // dense.shape[1]), own]


def reference(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> Results:
    """``(out, lse, scores)`` in float64."""
    heads = query.shape[1]
    chosen = chosen_rows(dense_rows(rows), ids, heads)
    seen = (ids.cpu() >= 0).repeat_interleave(heads // ids.shape[1], 1)
    results = attention64(
        query.cpu().unsqueeze(3),
        chosen[..., : rows.key_dim],
        chosen[..., rows.key_dim :],
        seen.unsqueeze(3),
        scale,
        softcap,
    )
    out, lse, scores = (result.squeeze(3) for result in results)
    return out, lse, scores
