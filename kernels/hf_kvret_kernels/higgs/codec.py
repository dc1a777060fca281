"""The codec: rows of numbers as bit-packed codes and fp16 scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import check_no_grad, choose_backend, launching_on
from hf_kvret_kernels.higgs import naive
from hf_kvret_kernels.higgs.naive import pack, unpack

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_GROUP, LARGEST_GROUP = 8, 1024
BITS = (2, 3, 4)


class Coded(NamedTuple):
    """Rows of numbers, coded; both are bytes, and contiguous when they come from ``encode``.

    Attributes:
        codes: ``[..., code_bytes(W)]`` uint8, laid out as ``naive`` says.
        scales: ``[..., scale_bytes(W)]`` uint8: the bytes of fp16 numbers, low byte first, those
            of each group together, groups in order.
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class HiggsCodec:
    """HIGGS: signed Hadamard transform of each group, pairs rounded to a grid for normal pairs.

    ``x`` of a group is multiplied by random signs and transformed; what comes out looks normally
    distributed. Its root mean square is the scale, fp16. Pairs over the scale are rounded to the
    nearest of ``4^bits`` points that are best for a standard normal pair: squared errors of
    0.1076, 0.0296 and 0.0078 of the mean square at 2, 3 and 4 bits. A number takes
    ``bits + 16 / group`` bits.

    Without the signs, which the authors of AQUA-KV leave out, a constant offset would land in a
    single number, where the grid ends: at an offset of three deviations the error is eight times as
    large.
    All groups of a row have the same signs.

    A group whose root mean square is below 3e-8 decodes to zeros, as its scale does; below 6e-5
    fp16 scales are coarse. From 65504 on the scale stays there, and large numbers are cut off.

    A codec holds options and no tensors: it is hashable, equal to another of the same options, and
    works on every device.

    Attributes:
        bits: of the codes, for one number: 2, 3 or 4.
        group: neighbouring numbers of a row that share a scale; a power of two, 8 to 1024.
        seed: of the signs, which are drawn on the CPU: the same on every device.

    Raises:
        ValueError: bits or a group that there are not.

    Paper: AQUA-KV, section 3.3; Malinovskii et al. 2024, HIGGS.
    """

    bits: int
    group: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits}: pass one of {', '.join(map(str, BITS))}")
        group = self.group
        if not SMALLEST_GROUP <= group <= LARGEST_GROUP or group & (group - 1):
            raise ValueError(
                f"group={group}: pass a power of two from {SMALLEST_GROUP} to {LARGEST_GROUP}"
            )

    @property
    def code_bits(self) -> int:
        """Bits of one code, which stands for a pair of numbers."""
        return 2 * self.bits

    @property
    def bits_per_value(self) -> float:
        """Bits that a number takes in all: codes and scales."""
        return self.bits + 16 / self.group

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of a row of ``width`` numbers.

        Raises:
            ValueError: a width that is no multiple of the group.
        """
        self.check_width(width)
        return width * self.bits // 8

    def scale_bytes(self, width: int) -> int:
        """Bytes of the scales of a row of ``width`` numbers.

        Raises:
            ValueError: a width that is no multiple of the group.
        """
        self.check_width(width)
        return width // self.group * 2

    def check_width(self, width: int) -> None:
        """Raise ValueError unless rows of ``width`` numbers are made of whole groups."""
        if width < 1 or width % self.group:
            raise ValueError(
                f"rows have {width} numbers, group is {self.group}: pass rows of a multiple of it, "
                f"or make the codec with a smaller power of two (at least {SMALLEST_GROUP})"
            )

    def to(self, device: torch.device | str) -> Self:
        """The codec itself, once its tables are on ``device``.

        Nothing has to call this; but the first use on a device copies the tables there, which a
        CUDA graph cannot do while it is captured.
        """
        place = torch.empty(0, device=device).device
        self.sign_tensor(place)
        naive.grid_merits(self.bits, place)
        for dtype in (torch.float16, torch.bfloat16):
            naive.grid_words(self.bits, place, dtype)
        return self

    def encode(self, x: torch.Tensor, backend: str = "auto") -> Coded:
        """Codes and scales of the rows of ``x``, on its device; each row by itself.

        A group with a NaN or an infinity decodes to NaN altogether, and so does one whose squares
        add up beyond fp32, 3e38; other groups decode as if it were not there.

        Args:
            x: ``[..., W]`` fp32, bf16 or fp16, any strides (other than contiguous rows are
                copied); W a multiple of the group. There may be no rows.
            backend: ``"auto"``, ``"naive"``, ``"cpp"`` (the compiled library; ``"auto"`` on a CPU
                that has it) or ``"triton"``.

        Raises:
            ValueError: a shape or dtype that does not fit, an unknown backend, ``"cpp"`` for
                another device, gradients.
            ImportError: ``"triton"`` without Triton, ``"cpp"`` without the library.
        """
        check_no_grad(x=x)
        if x.ndim < 1 or x.dtype not in FLOATS:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: pass fp32, bf16 or fp16 [..., W]")
        lead, width = x.shape[:-1], x.shape[-1]
        code_bytes, scale_bytes = self.code_bytes(width), self.scale_bytes(width)
        backend_name = self._choose(backend, x)
        with launching_on(x):
            codes, scales = self.encode_rows(x.reshape(-1, width).contiguous(), backend_name)
        return Coded(
            codes.view(*lead, code_bytes), scales.view(torch.uint8).view(*lead, scale_bytes)
        )

    def decode(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[..., W]`` of ``dtype``, contiguous: what ``encode`` made codes and scales of, about.

        Args:
            codes: ``[..., code_bytes(W)]`` uint8; may be a part of wider rows.
            scales: ``[..., scale_bytes(W)]`` uint8, likewise, on the device of the codes.
            dtype: fp32, bf16 or fp16.
            backend: as of ``encode``.
            added: ``[..., W]`` fp32, added before numbers are rounded to ``dtype``: each of its m
                rows to n / m rows in turn, of n in all.

        Raises:
            ValueError: a shape, dtype or device that does not fit, an unknown backend.
            ImportError: as of ``encode``.
        """
        if dtype not in FLOATS:
            raise ValueError(f"dtype={dtype}: choose fp32, bf16 or fp16")
        for name, part in (("codes", codes), ("scales", scales)):
            if part.ndim < 1 or part.dtype != torch.uint8:
                raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}: pass bytes, uint8")
        width = codes.shape[-1] * 8 // self.bits
        if self.code_bytes(width) != codes.shape[-1]:
            raise ValueError(
                f"codes has rows of {codes.shape[-1]} bytes: rows of W numbers, a multiple of "
                f"{self.group}, have W * {self.bits} / 8"
            )
        scale_shape = (*codes.shape[:-1], self.scale_bytes(width))
        if tuple(scales.shape) != scale_shape:
            raise ValueError(
                f"scales has shape {tuple(scales.shape)}: pass {list(scale_shape)} for codes of "
                f"shape {tuple(codes.shape)}"
            )
        if scales.device != codes.device:
            raise ValueError(f"scales is on {scales.device}, codes on {codes.device}: move one")
        parts = codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scale_shape[-1])
        backend_name = self._choose(backend, codes)
        if added is not None:
            added = self._checked(added, width, len(parts[0]), codes.device)
        with launching_on(codes):
            rows = self.decode_rows(*parts, dtype, backend_name, added)
        return rows.view(*codes.shape[:-1], width)

    @staticmethod
    def _checked(added: torch.Tensor, width: int, count: int, device: torch.device) -> torch.Tensor:
        """``added [m, W]``, contiguous; ValueError where it is not for ``count`` rows."""
        rows = added.numel() // width
        fits = added.shape[-1:] == (width,) and (not count or (rows and not count % rows))
        if not fits or added.dtype != torch.float32 or added.device != device:
            raise ValueError(
                f"added is {added.dtype} {tuple(added.shape)} on {added.device}: pass fp32 rows of "
                f"{width} numbers on {device}, as many as divide {count} rows"
            )
        return added.reshape(-1, width).contiguous()

    def _choose(self, backend: str, tensor: torch.Tensor) -> str:
        """Name of the implementation, with ``"cpp"`` among them."""
        if host_library.is_asked(backend, tensor):
            return "cpp"
        return choose_backend(backend, tensor)

    def host_coding(self, key_mean: torch.Tensor | None = None) -> bytes:
        """``hfk_coding`` for the compiled library; ``key_mean`` as of ``CodedRows``."""
        cpu = torch.device("cpu")
        grid, signs = naive.grid_points(self.bits, cpu), self.sign_tensor(cpu)
        return host_library.pack_coding(grid, signs, self.bits, key_mean)

    def sign_tensor(self, device: torch.device) -> torch.Tensor:
        """``[group]`` fp32 of +1 and -1 on ``device``; shared, not to be written to."""
        return naive.random_signs(self.group, self.seed, device)

    def encode_rows(self, rows: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``(codes, scales)`` of ``rows [n, W]``, contiguous; uint8 and fp16 of any shapes."""
        signs = self.sign_tensor(rows.device)
        if backend == "cpp":
            codes = rows.new_empty(len(rows), self.code_bytes(rows.shape[1]), dtype=torch.uint8)
            scales = rows.new_empty(len(rows), self.scale_bytes(rows.shape[1]), dtype=torch.uint8)
            tables = _nearest(self.bits)
            coding = self.host_coding()
            host_library.run_codes("hfk_encode", rows, codes, scales, coding, tables=tables)
            return codes, scales
        if backend == "triton":
            from hf_kvret_kernels.higgs import triton_codes

            merits = naive.grid_merits(self.bits, rows.device)
            return triton_codes.higgs_encode(rows, signs, merits, self.group, self.code_bits)
        codes, scales = naive.higgs_encode(rows.view(-1, self.group), signs, self.bits)
        return pack(codes.view(len(rows), rows.shape[1] // 2), self.code_bits), scales

    def decode_rows(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        backend: str,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``n * W`` numbers of ``codes [n, code_bytes]`` and ``scales [n, scale_bytes]``, uint8.

        ``added [m, W]`` fp32 or None, see ``decode``.
        """
        signs = self.sign_tensor(codes.device)
        if backend == "cpp":
            width = codes.shape[1] * 8 // self.bits
            out = codes.new_empty(len(codes), width, dtype=dtype)
            codes, scales = (x if x.stride(1) == 1 else x.contiguous() for x in (codes, scales))
            coding = self.host_coding()
            host_library.run_codes("hfk_decode", out, codes, scales, coding, added)
            return out
        exact = dtype if added is None else torch.float32
        if backend == "triton":
            from hf_kvret_kernels.higgs import triton_codes

            words = naive.grid_words(self.bits, codes.device, torch.float16)
            rows = triton_codes.decode(
                codes, scales, exact, self.group, self.code_bits, signs, words
            )
        else:
            indices = unpack(codes, self.code_bits).view(-1, self.group // 2)
            halves = naive.half_numbers(scales).view(-1, 1)
            rows = naive.higgs_decode(indices, halves, signs, self.bits)
        if added is not None:
            count, width = added.shape
            rows = rows.reshape(count, rows.numel() // (count * width), width) + added[:, None]
        return rows.to(dtype)


@cache
def _nearest(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the compiled library looks up to encode: the ``tables`` of its ``run_codes``."""
    cpu = torch.device("cpu")
    merits = torch.nn.functional.pad(naive.grid_merits(bits, cpu), (0, 1))
    return merits, host_library.near_points(naive.grid_points(bits, cpu))
