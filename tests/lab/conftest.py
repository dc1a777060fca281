"""A tiny model with a tokenizer, in a folder as a user would have it."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kvret.lab.evaluate.subject import Subject, load_subject

WORDS = (
    "One of the special magic numbers for quiet-river is: 4821. The grass is green. The sky is "
    "blue. Here we go. What is the answer? Question: Answer: according to the text above, there "
    "are many words in a list, and some appear more often than others. 0123456789 abcdef"
)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers and a BPE tokenizer of 400 tokens with BOS."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=65_536,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of about 6,000 tokens for the tiny tokenizer."""
    path = tmp_path_factory.mktemp("text") / "tiny.txt"
    lines = [f"{number}. {WORDS[number % 40 :][:120]}" for number in range(120)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def subject(tiny_model_dir: Path) -> Subject:
    """The tiny model with its tokenizer, which tests only read."""
    return load_subject(str(tiny_model_dir))
