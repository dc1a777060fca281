"""Shapes are those of the published models, and random weights stay finite."""

import json
from pathlib import Path

import pytest
import torch

from hf_kvret.lab.bench.shapes import load_shape, random_model, weight_bytes

# Parameters that the models' pages and papers state, to the last one.
PUBLISHED = {
    **{"llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400},
    **{"llama-3.1-70b": 70_553_706_496, "qwen3-8b": 8_190_735_360},
    **{"qwen3-4b": 4_022_468_096, "qwen3-0.6b": 596_049_920},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = load_shape(name)
    assert weight_bytes(shape.config, torch.bfloat16).held == 2 * PUBLISHED[name]


def test_a_step_reads_all_weights_but_the_input_embedding() -> None:
    config = load_shape("tiny").config
    table = config.vocab_size * config.hidden_size * 4
    untied = weight_bytes(config, torch.float32)
    assert untied.held - untied.read == table
    assert untied.row == config.hidden_size * 4
    config.tie_word_embeddings = True
    tied = weight_bytes(config, torch.float32)
    # The one table is the head, and the head is read in full.
    assert tied.held == tied.read == untied.read


def test_fewer_layers_keep_everything_else() -> None:
    shape = load_shape("qwen3-8b")
    config = shape.with_layers(4)
    assert (config.num_hidden_layers, len(config.layer_types)) == (4, 4)
    assert shape.layers == 36
    one = weight_bytes(shape.with_layers(3), torch.float32).held
    two = weight_bytes(config, torch.float32).held
    # 4,096 to 32 + 2 * 8 heads of 128 and back, three matrices of 12,288, four norms.
    layer = 4096 * 128 * (32 + 16) + 32 * 128 * 4096 + 3 * 4096 * 12_288 + 2 * 4096 + 2 * 128
    assert two - one == 4 * layer
    with pytest.raises(ValueError, match="has 1 to 36"):
        shape.with_layers(37)


def test_some_of_layers_that_differ_are_refused(tmp_path: Path) -> None:
    written = load_shape("qwen3-8b").config.to_dict()
    kinds = ["full_attention", "sliding_attention"] * 18
    written |= {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(written))
    shape = load_shape(str(tmp_path))
    assert shape.with_layers(36).num_hidden_layers == 36
    with pytest.raises(ValueError, match=r"layers of .* differ"):
        shape.with_layers(4)


def test_random_weights_keep_logits_near_one_and_follow_the_seed() -> None:
    config = load_shape("tiny").config
    config.num_hidden_layers = 6
    first, again, other = (random_model(config, torch.float16, "cpu", seed) for seed in (0, 0, 1))
    tokens = torch.randint(1024, (1, 32), generator=torch.Generator().manual_seed(0))
    logits = first(tokens).logits
    assert logits.dtype == torch.float16 and 0.3 < logits.float().std() < 3
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
