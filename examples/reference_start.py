"""The reference model's architecture, and weights from which recall forms within minutes."""

from __future__ import annotations

import torch
from torch import nn
from train_needle_model import MAX_POSITION
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.06,
    )
    model = LlamaForCausalLM(config)
    start_near_recall(model)
    return model


# The residual stream at the start: embeddings, the token before, the one before that, and a bag of
# the last dozen. The last coordinate is the same for every token; heads without biases need it to
# attend by position.
EMBEDDING, PREVIOUS, SECOND, BAG = slice(0, 112), slice(112, 160), slice(160, 208), slice(208, 255)
CONSTANT = 255


@torch.no_grad()
def start_embeddings(model: PreTrainedModel) -> torch.Tensor:
    """Sets embeddings and output matrix; returns the embeddings ``[vocabulary, width]``."""
    config = model.config
    scale = config.initializer_range
    embedding = 0.3 * scale * torch.randn(config.vocab_size, config.hidden_size)
    embedding[:, EMBEDDING] = scale * torch.randn(config.vocab_size, EMBEDDING.stop)
    embedding[:, CONSTANT] = 0.5 * scale * EMBEDDING.stop**0.5
    model.model.embed_tokens.weight.copy_(embedding)
    # Untied: a tied output would push all embeddings the same way and bury what tells them apart.
    model.lm_head.weight.copy_(embedding)
    model.lm_head.weight[:, EMBEDDING.stop :] = 0.0
    return embedding


@torch.no_grad()
def start_near_recall(model: LlamaForCausalLM) -> None:
    """Weights from which copying forms within minutes; everything is trained from there.

    The first layer copies the tokens one and two back and a blurred bag of the last dozen. In the
    next three layers, one head starts as an induction head: its query reads a token and the one
    before, its keys read the two tokens before theirs, so that it finds what came after the same
    two tokens, and writes that back. Another one attends to places with a similar bag.
    """
    config = model.config
    width, dim = config.hidden_size, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    embedding = start_embeddings(model)
    reads = [torch.linalg.qr(torch.randn(EMBEDDING.stop, dim)).Q.T for _ in range(2)]
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.o_proj.weight.mul_(0.03)
        layer.mlp.down_proj.weight.mul_(0.05)
        if number > 3:
            continue
        for head, read in enumerate(reads):
            rows = slice(head * dim, (head + 1) * dim)
            attention.v_proj.weight[rows] *= 0.1
            attention.v_proj.weight[rows, EMBEDDING] += read
            if number == 0:
                continue
            columns = slice(head * group * dim, (head * group + 1) * dim)
            query, key = torch.zeros(dim, width), torch.zeros(dim, width)
            if head == 0:
                newest, older = (0.14 * torch.randn(dim, 48) for _ in range(2))
                # What the first layer copies has about twice the size of the token itself.
                query[:, EMBEDDING] = 2.0 * newest @ reads[0][:48]
                query[:, PREVIOUS], key[:, PREVIOUS], key[:, SECOND] = older, newest, older
            else:
                query[:, BAG] = 0.08 * torch.randn(dim, BAG.stop - BAG.start)
                key = query.clone()
            for projection in (query, key):
                # The fast coordinates of the rotary embedding tell little at a distance.
                projection.view(2, dim // 2, width)[:, :8] *= 0.3
            attention.k_proj.weight[rows] *= 0.2
            attention.k_proj.weight[rows] += key
            attention.q_proj.weight[columns] *= 0.2
            attention.q_proj.weight[columns] += query
            attention.o_proj.weight[EMBEDDING, columns] += 0.1 * read.T
    first = model.model.layers[0].self_attn
    _attend_by_position(first, embedding)
    for query_head, target in ((0, PREVIOUS), (1, SECOND), (group, BAG)):
        columns = slice(query_head * dim, (query_head + 1) * dim)
        size = target.stop - target.start
        first.o_proj.weight[target] *= 0.1
        first.o_proj.weight[target, columns] += 0.1 * torch.eye(dim)[:size]


def _attend_by_position(attention: nn.Module, embedding: torch.Tensor) -> None:
    """First-layer heads that look 1 and 2 tokens back, and one that looks over the last dozen."""
    config = attention.config
    dim, half = config.head_dim, config.head_dim // 2
    group = config.num_attention_heads // config.num_key_value_heads
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    sharp, broad = torch.zeros(half), torch.zeros(half)
    # Six fast frequencies single out one offset; slower ones fall off over a dozen tokens.
    sharp[:6] = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]) / 12
    broad[3:12] = 1 / 9
    constant = (embedding[:, CONSTANT] / embedding.pow(2).mean(-1).sqrt()).mean()
    for query, offset, shares, logit in (
        (0, 1, sharp, 30.0),
        (1, 2, sharp, 30.0),
        (group, 3, broad, 12.0),
    ):
        key = query // group * dim
        strength = (logit * dim**0.5 * shares).sqrt() / constant
        attention.k_proj.weight[key : key + half, CONSTANT] = strength
        start = query * dim
        attention.q_proj.weight[start : start + dim] *= 0.2
        cosine, sine = torch.cos(offset * angles), torch.sin(offset * angles)
        attention.q_proj.weight[start : start + half, CONSTANT] = strength * cosine
        attention.q_proj.weight[start + half : start + dim, CONSTANT] = -strength * sine
