"""Levels, rotation, and the codes that ``encode`` writes."""

import pytest
import torch

from hf_kvret_kernels import paris
from hf_kvret_kernels.paris.codes import rotation_blocks, rotation_stride

from .draws import NAIVE, Place, draw, hadamard, paris_tools, run_at

# Head dims: below 8, a power of two, several blocks with some padding.
HEAD_DIMS = (5, 64, 133)


def test_levels_are_the_converged_lloyd_max_ones() -> None:
    expected = torch.tensor([0.0425, 0.1280, 0.2152, 0.3053, 0.4003, 0.5030, 0.6193, 0.7648])
    levels = paris.magnitude_levels()
    assert levels.dtype == torch.float32 and levels.shape == (8,)
    # The figures are given to four places; the authors' table differs by up to 0.0045.
    assert (levels - expected).abs().max() < 1e-4


def test_each_level_is_the_mean_of_the_magnitudes_nearest_to_it() -> None:
    levels, points = paris.magnitude_levels().double(), 1 << 20
    x = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    density = (1 - x.square()).pow((8 - 3) / 2)
    nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
    cells = (torch.zeros(8, dtype=x.dtype).index_add(0, nearest, y) for y in (density * x, density))
    moment, mass = cells
    torch.testing.assert_close(moment / mass, levels, atol=1e-6, rtol=0)


def test_signs_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    signs = paris.random_signs(128, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(signs, paris.random_signs(128, seed=3))
    assert not torch.equal(signs, paris.random_signs(128, seed=4))
    assert signs.abs().eq(1).all() and 40 < signs.eq(1).sum() < 88


@pytest.mark.parametrize(
    ("dim", "room", "stride"),
    [(1, 8, 1), (40, 64, 1), (133, 136, 87), (160, 160, 99), (576, 576, 355)],
)
def test_blocks_are_rotated_apart(dim: int, room: int, stride: int) -> None:
    """40 numbers are padded to one block; 160 are 128 + 32, in steps that are coprime to 160."""
    signs, _ = paris_tools(dim)
    assert paris.rotated_dim(dim) == room and rotation_stride(room) == stride
    expected = torch.zeros(room, room)
    for start, end in rotation_blocks(room):
        own = torch.arange(start, end)
        expected[own * stride % room, start:end] = signs[own, None] * hadamard(end - start).float()
    x = draw(2, 3, dim)
    rotated = paris.rotate(x, signs)
    # fp32 rounding of sums of up to 512 terms of size 1.
    torch.testing.assert_close(rotated, x @ expected[:dim], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [8, 128, 136, 160, 288, 576, 672, 1000, 1024])
def test_blocks_are_powers_of_two_that_take_every_coordinate_once(dim: int) -> None:
    sizes = [end - start for start, end in rotation_blocks(dim)]
    assert sum(sizes) == dim == rotation_blocks(dim)[-1][1]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert all(size & (size - 1) == 0 and size >= 8 for size in sizes)
    taken = {i * rotation_stride(dim) % dim for i in range(dim)}
    assert len(taken) == dim and (rotation_stride(dim) == 1) == (len(sizes) == 1)
    assert paris.rotated_dim(dim) == dim


def test_long_vectors_are_rounded_up_to_bytes_and_short_ones_to_powers_of_two() -> None:
    dims = {1: 8, 80: 128, 96: 128, 128: 128, 129: 136, 160: 160, 250: 256, 576: 576, 1019: 1024}
    assert {dim: paris.rotated_dim(dim) for dim in dims} == dims


def test_rotation_takes_any_strides_and_half_precision() -> None:
    signs, _ = paris_tools(40)
    x = draw(40, 3, 2, dtype=torch.bfloat16).permute(2, 1, 0)
    expected = paris.rotate(x.float().contiguous(), signs)
    torch.testing.assert_close(paris.rotate(x, signs), expected, rtol=0, atol=1e-5)


def test_bits_levels_and_weights_of_a_key_worked_out_by_hand(where: Place) -> None:
    """The level nearest to each coordinate of a unit subspace was read off the table."""
    signs, levels = paris_tools(8)
    x = torch.tensor([0.05, -0.13, -0.22, 0.31, 0.40, 0.50, -0.15, 0.6353])
    level_ids, sign_byte = [0, 1, 2, 3, 4, 5, 1, 6], 0b10111001
    transform = paris.rotate(torch.eye(8), signs)
    keys = (transform @ (3 * x)).view(1, 1, 1, 8)
    codes = run_at(where, paris.encode, keys, signs, levels)
    assert codes.sign.flatten().tolist() == [sign_byte]
    word = sum(level << (3 * j) for j, level in enumerate(level_ids))
    assert codes.magnitude.flatten().tolist() == [word & 255, (word >> 8) & 255, word >> 16]
    alpha = (x.abs() * levels[level_ids]).view(-1, 8).sum(1)
    # Three bits of mantissa.
    torch.testing.assert_close(codes.weight.flatten(), 3 / alpha, rtol=2**-4, atol=0)


def test_directions_come_back_with_the_error_of_a_four_bit_quantizer() -> None:
    signs, levels = paris_tools(128)
    keys = draw(1, 1, 2048, 128)
    codes = paris.encode(keys, signs, levels)
    v = paris.decode(codes, levels).unflatten(-1, (-1, 8)) / codes.weight.unsqueeze(-1)
    x = paris.rotate(keys, signs).unflatten(-1, (-1, 8))
    u = x / x.norm(dim=-1, keepdim=True)
    # Eight times the quantizer's distortion, here by its own draw; 4-bit Lloyd-Max of a Gaussian
    # has 0.0095, and a bounded coordinate a little less.
    directions = draw(200_000, 8, seed=1)
    directions = (directions / directions.norm(dim=1, keepdim=True)).abs()
    nearest = (levels - directions[..., None]).abs().amin(-1)
    distortion = nearest.square().sum(1).mean().item()
    assert 0.003 < distortion < 0.0095
    assert (u - v).square().sum(-1).mean().item() == pytest.approx(distortion, rel=0.03)
    # The weight undoes the quantizer's shrinking: <w v, u> = r for every subspace.
    recovered = (codes.weight.unsqueeze(-1) * v * u).sum(-1)
    torch.testing.assert_close(recovered, x.norm(dim=-1), rtol=2**-4 + 1e-3, atol=1e-5)


@pytest.mark.factor("head_dim", HEAD_DIMS)
def test_keys_are_encoded_as_by_the_reference(where: Place, head_dim: int) -> None:
    signs, levels = paris_tools(head_dim)
    keys = draw(2, 9, 3, head_dim).transpose(1, 2)
    naive, other = (run_at(place, paris.encode, keys, signs, levels) for place in (NAIVE, where))
    x = paris.rotate(keys, signs)
    # The two add in another order: signs may differ where a coordinate is 0 but for rounding,
    # levels where it lies on a boundary.
    far_from_zero = x.abs().unflatten(-1, (-1, 8)).amin(-1) > 1e-5
    assert torch.equal(naive.sign[far_from_zero], other.sign[far_from_zero])
    assert far_from_zero.float().mean() > 0.99
    assert (naive.magnitude == other.magnitude).float().mean() > 0.999
    steps = (other.weight_codes.short() - naive.weight_codes.short()).abs()
    assert steps.max() <= 1 and (steps == 0).float().mean() > 0.99


def test_half_precision_keys(where: Place) -> None:
    signs, levels = paris_tools(32)
    keys = draw(1, 2, 20, 32, dtype=torch.bfloat16)
    exact = paris.encode(keys.float(), signs, levels, backend="naive")
    codes = run_at(where, paris.encode, keys, signs, levels)
    assert torch.equal(codes.sign, exact.sign)
    assert (codes.weight_codes == exact.weight_codes).float().mean() > 0.95


def test_weights_keep_three_bits_and_what_is_too_large_ends_at_the_largest(where: Place) -> None:
    signs, levels = paris_tools(32)
    keys = draw(1, 1, 9, 32)
    exact = run_at(where, paris.encode, keys, signs, levels).weight
    for power in (-12, 8, 30):
        codes = run_at(where, paris.encode, keys * 2.0**power, signs, levels)
        want = (exact * 2.0**power).clamp(max=57344)
        # Below 2**-14 codes are 2**-17 apart.
        torch.testing.assert_close(codes.weight, want, rtol=2**-7, atol=2**-17)
        assert codes.is_valid().all()


def test_zero_keys_weigh_nothing(where: Place) -> None:
    signs, levels = paris_tools(40)
    keys = draw(1, 1, 3, 40)
    keys[0, 0, 1] = 0
    codes = run_at(where, paris.encode, keys, signs, levels)
    assert codes.weight[0, 0, 1].eq(0).all()
    assert paris.decode(codes, levels).isfinite().all()


def test_codes_go_into_views_of_a_buffer_and_nowhere_else(where: Place) -> None:
    backend, device = where
    keys, signs, levels = (x.to(device) for x in (draw(2, 2, 9, 24), *paris_tools(24)))
    whole = paris.encode(keys, signs, levels, backend=backend)
    room = paris.ParisCodes.empty(2, 2, 16, 24, device=device)
    room.sign.fill_(0xA5)
    room.record.fill_(0xA5)
    for start, end in ((0, 4), (4, 9)):
        part = room.tokens(3 + start, 3 + end)
        out = paris.encode(keys[:, :, start:end], signs, levels, out=part, backend=backend)
        assert out is part
    assert all(map(torch.equal, vars(room.tokens(3, 12)).values(), vars(whole).values()))
    for outside in (room.tokens(0, 3), room.tokens(12, 16)):
        assert outside.sign.eq(0xA5).all() and outside.record.eq(0xA5).all()


def test_no_keys_make_no_codes(where: Place) -> None:
    signs, levels = paris_tools(16)
    codes = run_at(where, paris.encode, draw(2, 1, 0, 16), signs, levels)
    shapes = [tuple(plane.shape) for plane in vars(codes).values()]
    assert shapes == [(2, 1, 0, 2), (2, 1, 0, 8)]
    assert paris.decode(codes, levels).shape == (2, 1, 0, 16)


def test_a_code_of_128_dims_takes_80_bytes() -> None:
    assert paris.ParisCodes.empty(1, 1, 10, 128).nbytes() == 10 * (16 + 48 + 16)
