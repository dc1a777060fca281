"""A chat template surrounds a prompt and changes nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_kvret.lab.evaluate.texts import chat_parts


def test_chat_parts_surround_the_message(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with pytest.raises(ValueError, match="no chat template"):
        chat_parts(tokenizer)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    assert chat_parts(tokenizer) == ("[", "]>")
    tokenizer.chat_template = "nothing"
    with pytest.raises(ValueError, match="doesn't show a message"):
        chat_parts(tokenizer)
