"""Rope: the rotation by its definition, its inverse, and what configurations say about it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from hf_kvret.testing.models import MODELS
from hf_kvret_model_patches.rope import Rope

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}


def llama(**rope: Any) -> PreTrainedConfig:
    """A small Llama with the RoPE parameters `rope`."""
    return AutoConfig.for_model(
        "llama", vocab_size=128, hidden_size=64, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope},
    )  # fmt: skip


def by_complex_numbers(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """The definition: pair number p at position m is the complex number z, and becomes
    ``z * factor * exp(i m inv_freq[p])``. In fp64."""
    width = rope.rotary_dim
    turned = x[..., :width].double()
    if rope.layout == "half":
        z = torch.complex(turned[..., : width // 2], turned[..., width // 2 :])
    else:
        z = torch.complex(turned[..., ::2], turned[..., 1::2])
    angles = positions.double()[..., None] * rope.inv_freq.double()
    if angles.ndim == 3:
        angles = angles[:, None]
    z = z * torch.polar(torch.full_like(angles, rope.attention_factor), angles)
    parts = [z.real, z.imag]
    pair = torch.cat(parts, -1) if rope.layout == "half" else torch.stack(parts, -1).flatten(-2)
    return torch.cat([pair, x[..., width:].double()], -1)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))


POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 7, 130, 2047]])
ROPES = {
    "half": Rope.of(llama(), 0),
    "factor": Rope.of(llama(**YARN), 0),
    "partial": Rope(torch.tensor([1.0, 0.1, 0.01]), 1.0, "half"),
    "interleaved": Rope.of(llama(), 0, "interleaved"),
    "partial_interleaved": Rope(torch.tensor([1.0, 0.1, 0.01]), 1.5, "interleaved"),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotating_is_multiplying_complex_numbers(name: str, x: torch.Tensor) -> None:
    rope, before = ROPES[name], x.clone()
    got = rope.rotate(x, POSITIONS)
    assert got.shape == x.shape and got.dtype == x.dtype
    # An angle of 2047 in fp32 is known to 1e-4.
    torch.testing.assert_close(
        got.double(), by_complex_numbers(x, POSITIONS, rope), atol=3e-4, rtol=0
    )
    torch.testing.assert_close(
        got[0].double(), by_complex_numbers(x, POSITIONS, rope)[0], atol=2e-6, rtol=1e-6
    )
    assert torch.equal(got[..., rope.rotary_dim :], x[..., rope.rotary_dim :])
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ROPES)
def test_unrotating_is_the_inverse(name: str, x: torch.Tensor) -> None:
    rope = ROPES[name]
    for there, back in ((rope.rotate, rope.unrotate), (rope.unrotate, rope.rotate)):
        found = back(there(x, POSITIONS), POSITIONS)
        error = (found - x).norm(dim=-1) / x.norm(dim=-1)
        assert error.max() < 1e-6  # a few fp32 roundings


def test_positions_may_be_shared_by_the_rows(x: torch.Tensor) -> None:
    rope, row = ROPES["half"], POSITIONS[1]
    each = rope.rotate(x, row.expand(2, 5))
    assert torch.equal(rope.rotate(x, row), each)
    assert torch.equal(rope.rotate(x, row[None]), each)
    assert not torch.equal(rope.rotate(x[:, :, :1], row[4:]), each[:, :, :1])
    assert torch.equal(rope.rotate(x[:, :, 4:], row[4:]), each[:, :, 4:])


def test_rotating_to_one_position_is_rotating_all_tokens_there(x: torch.Tensor) -> None:
    for rope in ROPES.values():
        there = torch.full((5,), 2048)
        assert torch.equal(rope.rotate_to(x, 2048), rope.rotate(x, there))
    assert ROPES["half"].rotate_to(x[:, :, :0], 3).shape == (2, 3, 0, 16)


def test_arithmetic_is_fp32_and_the_result_has_the_dtype_asked_for(x: torch.Tensor) -> None:
    rope, half = ROPES["factor"], x.bfloat16()
    exact = rope.rotate(half.float(), POSITIONS)
    assert torch.equal(rope.rotate(half, POSITIONS, dtype=torch.float32), exact)
    assert torch.equal(rope.rotate(half, POSITIONS), exact.bfloat16())
    back = rope.unrotate(exact.bfloat16(), POSITIONS)
    assert back.dtype == torch.bfloat16
    # Two roundings to 8 bits, each of at most 2 ** -9.
    assert ((back.float() - half.float()).norm(dim=-1) / half.float().norm(dim=-1)).max() < 4e-3


def test_without_rope_all_stays_as_it_is(x: torch.Tensor) -> None:
    rope = Rope.of(MODELS["gpt2"].config(), 0)
    assert (rope.layout, rope.rotary_dim) == ("none", 0)
    assert rope.rotate(x, POSITIONS) is x and rope.unrotate(x, POSITIONS) is x
    assert rope.rotate_to(x, 7, dtype=torch.float64).dtype == torch.float64


EXPECTED = {
    "llama": ("half", 16, 1.0),
    "qwen3": ("half", 24, 1.0),
    "gpt_oss": ("half", 16, 0.1 * math.log(8.0) + 1.0),
    "gpt_neox": ("half", 4, 1.0),
    "cohere": ("interleaved", 16, 1.0),
    "glm": ("interleaved", 8, 1.0),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_layout_width_and_factor_are_found_out(name: str) -> None:
    rope = Rope.of(MODELS[name].config(), 1)
    layout, width, factor = EXPECTED[name]
    assert (rope.layout, rope.rotary_dim) == (layout, width)
    assert rope.attention_factor == pytest.approx(factor)


def test_linear_frequencies_are_divided() -> None:
    plain, linear = Rope.of(llama(), 0), Rope.of(llama(rope_type="linear", factor=4.0), 0)
    assert torch.equal(linear.inv_freq, plain.inv_freq / 4)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen2_vl", "cohere", "gpt_neox", "gemma3"])
def test_frequencies_have_the_very_bits_of_the_models(name: str) -> None:
    """Each kind of layer has its own."""
    model = MODELS[name].build()
    embedding, kinds = model.get_decoder().rotary_emb, ["", ""]
    if name == "gemma3":
        kinds = ["sliding_attention_", "full_attention_"]
    for layer, kind in enumerate(kinds):
        rope = Rope.of(model.config, layer)
        assert torch.equal(rope.inv_freq, getattr(embedding, f"{kind}inv_freq"))
        assert rope.attention_factor == getattr(embedding, f"{kind}attention_scaling")


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("smollm3", ["half", "none", "half"]), ("exaone4", ["half", "none", "none"])],
)
def test_layers_without_rope_are_known(name: str, layouts: list[str]) -> None:
    config = MODELS[name].config()
    assert [Rope.of(config, layer).layout for layer in range(3)] == layouts


def spiral() -> PreTrainedConfig:
    config = llama()
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1.0}
    return config


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
    "factor": 8.0,
}


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        (llama(rope_type="dynamic", factor=2.0), (0,), "change with the length"),
        (llama(**LONGROPE), (0,), "another for long ones"),
        (spiral(), (0,), "'spiral' in layer 0 is not known"),
        (llama(), (0, "quarter"), "layout='quarter': allowed are 'half'"),
        (llama(), (2,), "layer=2: the model has layers 0 to 1"),
        ({}, (0,), "config is a dict"),
        (AutoConfig.for_model("llama4_text"), (0,), r"has no apply_rotary_pos_emb.*layout="),
        (MODELS["gpt2"].config(), (0, "half"), "use layout='none'"),
        # NanoChat turns the other way round.
        (
            AutoConfig.for_model("nanochat", num_hidden_layers=1),
            (0,),
            r"makes \[4\.0, 5\.0, .* of 0 to 7 at 90 degrees",
        ),
    ],
    ids=["dynamic", "longrope", "type", "layout", "layer", "config", "code", "none", "rotation"],
)
def test_unknown_rotations_are_refused(config: Any, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        Rope.of(config, *arguments)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_last_numbers_turn_as_the_first_would(layout: str) -> None:
    first = Rope(torch.tensor([1.0, 0.1, 0.01]), 1.5, layout)
    last = replace(first, last=True)
    x, positions = torch.randn(2, 3, 5, 16), torch.randint(0, 1000, (2, 5))
    moved = torch.cat([x[..., 10:], x[..., :10]], dim=-1)
    turned = first.rotate(moved, positions)
    expected = torch.cat([turned[..., 6:], turned[..., :6]], dim=-1)
    assert torch.equal(last.rotate(x, positions), expected)
    # Rounding of fp32.
    torch.testing.assert_close(last.unrotate(expected, positions), x, rtol=1e-5, atol=1e-5)
    assert last.settings == {"layout": layout, "attention_factor": 1.5, "last": True}
    assert "last" not in first.settings
