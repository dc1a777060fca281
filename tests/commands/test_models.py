"""``hf-kvret models``: one type, a configuration of the user's, mistakes."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig

from hf_kvret.commands import models


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("gemma3", ("22 sliding, 4 full", 4, 256, 16_384)),
        ("gpt2", ("12 full", 12, 64, 36_864)),
        ("jamba", ("28 recurrent, 4 full", 8, 128, 16_384)),
    ],
)
def test_a_type_has_the_layers_and_rows_of_its_default(name: str, facts: tuple[Any, ...]) -> None:
    one = models.default_type(name)
    assert (one.layer_counts, one.kv_heads, one.key_dim, one.token_bytes) == facts
    assert one.replay == (name != "jamba")


def test_one_type_says_all_that_is_known(program: Any) -> None:
    text = program("models", "deepseek_v3").out
    for words in ("61 full", "1 heads, 576 numbers", "70,272 in bf16", "replayed", "may be cut"):
        assert words in text
    assert "is_decoder=True" in program("models", "bert").out
    assert "refused: mistral has no full-attention layer" in program("models", "mistral").out
    assert "encoder-decoder" in program("models", "t5").out
    assert "computes attention by itself and ignores" in program("models", "bloom").out


def test_values_narrower_than_keys_count_with_their_own_size() -> None:
    if "mimo_v2_flash" not in models.type_names():
        pytest.skip("the type came with a newer transformers")
    assert models.default_type("mimo_v2_flash").token_bytes == 9 * 4 * (192 + 128) * 2


def test_a_folder_with_a_configuration_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MistralConfig(sliding_window=None, num_hidden_layers=3).save_pretrained(tmp_path / "full")
    full = models.find_type(str(tmp_path / "full"))
    assert (full.name, full.layer_counts, full.refusal) == ("mistral", "3 full", "")
    LlamaConfig(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=5
    ).save_pretrained(tmp_path / "a" / "b" / "c")
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c", "./a/b/c", "a/b/c/"):
        small = models.find_type(name)
        assert (small.kv_heads, small.key_dim) == (2, 32)
        assert small.token_bytes == 5 * 2 * 64 * 2


def test_an_unknown_type_and_one_without_text_say_so(program: Any) -> None:
    for name in ("qwen33", "./qwen3", "a/folder/of/mine"):
        error = program("models", name, status=2).err
        assert f"does not know the type {name!r}, and it is no folder" in error
    assert "refused: " in program("models", "clip_vision_model").out
