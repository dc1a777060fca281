"""The codec of 2 to 4 bits: what comes back, in how many bytes, how good the grids are."""

import importlib.util
import math
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_kvret_kernels.higgs import HiggsCodec, naive
from hf_kvret_kernels.higgs.naive import WORDS, grid_points, random_signs

from .draws import Place, draw, hadamard, run_at

CPU = torch.device("cpu")
# Squared error of a number of a standard normal pair with the best 16, 64 and 256 points.
BEST = {2: 0.1075, 3: 0.0296, 4: 0.0077}
SCRIPT = Path(__file__).parents[2] / "examples" / "make_higgs_grids.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_higgs_grids", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bits", BEST)
def test_grids_have_the_least_error(script: ModuleType, bits: int) -> None:
    points = grid_points(bits, CPU)
    assert points.shape == (4**bits, 2) and points.unique(dim=0).shape == points.shape
    assert torch.equal(points.half().float(), points)
    assert script.squared_error(points.double(), 400) == pytest.approx(BEST[bits], rel=0.02)


@pytest.mark.parametrize("group", [128, 256, 1024])
@pytest.mark.parametrize("bits", BEST)
def test_normal_numbers_lose_as_much_through_the_codec(bits: int, group: int) -> None:
    """Shorter groups lose less: their largest numbers are smaller, and the scale knows of them."""
    x = draw(1024, 1024, seed=bits)
    codec = HiggsCodec(bits, group)
    error = (codec.decode(*codec.encode(x)) - x).square().mean().item()
    assert error == pytest.approx(BEST[bits], rel=0.02)


@pytest.mark.slow
def test_the_script_makes_the_grids(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(script.make_grid(2).float(), grid_points(2, CPU))


CODECS = [HiggsCodec(bits, 64) for bits in (2, 3, 4)]
GROUPS = (8, 32, 128, 1024)
# Ten butterflies of numbers up to 4 in fp32, times a scale of about 1; and between codes no two
# backends may differ by more than a distance that is this near to the least.
FP32_ERROR = 1e-5


def name(codec: HiggsCodec) -> str:
    return f"{codec.bits}-{codec.group}"


def unpack_slowly(packed: list[int], code_bits: int) -> list[int]:
    """Codes of a row, bit by bit from the definition: planes of bytes, lowest code lowest."""
    planes = WORDS[code_bits][1]
    count = len(packed) // planes
    codes = []
    for i in range(count):
        word = sum(packed[plane * count + i] << (8 * plane) for plane in range(planes))
        codes += [word >> shift & (2**code_bits - 1) for shift in range(0, 8 * planes, code_bits)]
    return codes


def parts(codec: HiggsCodec, x: torch.Tensor, where: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes [groups, n] int64, scales [groups, 1] fp64)`` of the rows ``x [n, W]``."""
    coded = run_at(where, codec.encode, x)
    assert coded.codes.dtype == coded.scales.dtype == torch.uint8
    assert coded.codes.shape == (*x.shape[:-1], codec.code_bytes(x.shape[-1]))
    assert coded.scales.shape == (*x.shape[:-1], codec.scale_bytes(x.shape[-1]))
    rows = [unpack_slowly(row, codec.code_bits) for row in coded.codes.tolist()]
    codes = torch.tensor(rows).view(-1, codec.group // 2)
    return codes, coded.scales.view(torch.float16).double().view(-1, 1)


def there_and_back(where: Place, codec: HiggsCodec, x: torch.Tensor) -> torch.Tensor:
    """Numbers that went through codes."""
    return run_at(where, codec.decode, *run_at(where, codec.encode, x))


def decode_slowly(codec: HiggsCodec, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp64 groups of their codes and scales, from the definition."""
    points = grid_points(codec.bits, CPU).double()[codes].flatten(1)
    return points * scales @ hadamard(codec.group) * codec.sign_tensor(CPU).double()


@pytest.mark.factor("codec", CODECS, ids=name)
@pytest.mark.factor("rows", [1, 7])
def test_each_number_gets_the_best_code(where: Place, codec: HiggsCodec, rows: int) -> None:
    """Against all codes, in fp64: nearest points of the transformed group."""
    x = draw(rows, 3 * codec.group, seed=rows) * 2 + 0.3
    codes, scales = parts(codec, x, where)
    groups = x.double().view(len(codes), -1)
    rms = groups.square().mean(1, keepdim=True).sqrt()
    assert (scales - rms).abs().max() <= 2.0**-11 * rms.max() + FP32_ERROR
    pairs = groups * codec.sign_tensor(CPU).double() @ hadamard(codec.group) / scales
    pairs = pairs.view(len(codes), -1, 1, 2)
    far = (pairs - grid_points(codec.bits, CPU)).norm(dim=-1)
    chosen = far.gather(2, codes.unsqueeze(2)).squeeze(2)
    assert (chosen - far.amin(2)).max() <= FP32_ERROR


@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.factor("codec", CODECS, ids=name)
def test_decoding_is_as_defined(where: Place, codec: HiggsCodec, dtype: torch.dtype) -> None:
    x = draw(5, 2 * codec.group, dtype=dtype)
    codes, scales = parts(codec, x, where)
    expected = decode_slowly(codec, codes, scales).view_as(x)
    coded = run_at(where, codec.encode, x)
    back = run_at(where, codec.decode, *coded, dtype)
    assert back.dtype == dtype
    # Triton's interpreter cuts bf16 off instead of rounding it.
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}[dtype]
    error = (back.double() - expected).abs()
    assert (error <= FP32_ERROR + rounding * expected.abs()).all()
    assert (expected - x.double()).square().mean() < 0.3


@pytest.mark.factor("group", GROUPS)
def test_all_agree_with_torch_for_all_groups(where: Place, group: int) -> None:
    codec = HiggsCodec(3, group)
    x = draw(3, 3 * group, seed=group)
    expected, coded = codec.encode(x, backend="naive"), run_at(where, codec.encode, x)
    plain, added = codec.decode(*expected, backend="naive"), draw(1, 3 * group, seed=1)
    back = run_at(where, codec.decode, *expected)
    torch.testing.assert_close(back, plain, rtol=0, atol=FP32_ERROR)
    shifted = run_at(where, codec.decode, *expected, added=added)
    torch.testing.assert_close(shifted, plain + added, rtol=0, atol=FP32_ERROR)
    # A number halfway between two codes, or a scale between two fp16 numbers, may go either way.
    assert (coded.codes != expected.codes).double().mean() <= 0.01
    again = codec.decode(*coded, backend="naive")
    assert abs((again - x).square().mean() / (plain - x).square().mean() - 1) < 0.01
    if group > 8:
        assert (plain - x).square().mean() < 0.035


@pytest.mark.factor("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.factor("codec", CODECS, ids=name)
def test_a_group_with_nan_or_infinity_is_nan(where: Place, codec: HiggsCodec, bad: float) -> None:
    x = draw(3, 2 * codec.group)
    plain = codec.encode(x, backend="naive")
    x[1, 5] = bad
    back = there_and_back(where, codec, x)
    struck = torch.zeros_like(x, dtype=torch.bool)
    struck[1, : codec.group] = True
    assert torch.equal(back.isnan(), struck)
    expected = codec.decode(*plain, backend="naive")
    torch.testing.assert_close(back[~struck], expected[~struck], rtol=0, atol=FP32_ERROR)


@pytest.mark.factor("codec", CODECS, ids=name)
def test_numbers_too_large_for_fp16_are_cut_off(where: Place, codec: HiggsCodec) -> None:
    x = draw(2, codec.group) * 1e9
    back = there_and_back(where, codec, x)
    assert back.isfinite().all()
    assert back.abs().max() >= 60000
    # fp16's own largest numbers are not cut off.
    x = torch.full((1, codec.group), 60000.0).half()
    x[0, ::2] *= -1
    back = there_and_back(where, codec, x)
    assert ((back - x).square().mean().sqrt() <= 60000 * 0.5).all()


def test_of_equal_points_the_first_is_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each of 16 points four times over, as one of 64."""
    merits = naive.grid_merits(2, CPU).repeat_interleave(4, 0)
    monkeypatch.setattr(naive, "grid_merits", lambda bits, device: merits.to(device))
    codes, _ = parts(HiggsCodec(3, 64), draw(7, 64), place)
    assert (codes % 4 == 0).all() and len(codes.unique()) > 12


@pytest.mark.factor("codec", CODECS, ids=name)
def test_rows_in_wider_ones_and_strided_inputs(where: Place, codec: HiggsCodec) -> None:
    """Parts of rows are read where they lie, at odd addresses too; no rows are no rows."""
    x = draw(2, 3, 4, 2 * codec.group).transpose(0, 2)
    coded = run_at(where, codec.encode, x)
    assert all(map(torch.equal, coded, run_at(where, codec.encode, x.contiguous())))
    expected = run_at(where, codec.decode, *coded)
    sizes = coded.codes.shape[-1], coded.scales.shape[-1]
    for lead in (1, 2):
        wide = torch.full((4, 3, 2, lead + sum(sizes) + 2), 255, dtype=torch.uint8)
        codes, scales = wide.split([lead, *sizes, 2], -1)[1:3]
        codes.copy_(coded.codes)
        scales.copy_(coded.scales)
        assert torch.equal(run_at(where, codec.decode, codes, scales), expected)
    none = run_at(where, codec.encode, x[:0])
    back = run_at(where, codec.decode, *none, torch.bfloat16)
    assert back.shape == (0, 3, 2, x.shape[-1])


@pytest.mark.parametrize("group", [8, 64, 128, 1024])
def test_bytes_are_those_that_are_promised(group: int) -> None:
    x = draw(2, 4 * group)
    for bits in (2, 3, 4):
        codec = HiggsCodec(bits, group)
        coded = codec.encode(x)
        assert sum(part.nbytes for part in coded) == x.numel() * (bits / 8 + 2 / group)
        assert codec.bits_per_value == bits + 16 / group


def test_a_codec_is_its_options() -> None:
    codec = HiggsCodec(2, 128, seed=3)
    assert codec == HiggsCodec(2, 128, 3) and codec != HiggsCodec(2, 128, 4)
    assert hash(codec) == hash(pickle.loads(pickle.dumps(codec)))
    assert codec.to("cpu") is codec
    state = torch.random.get_rng_state()
    signs = random_signs(256, 11, CPU)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert not torch.equal(signs, random_signs(256, 12, CPU))
