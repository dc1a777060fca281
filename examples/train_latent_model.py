"""Train the latent model: a small DeepSeek-V2 of real text whose 16 heads share one latent.

    python examples/train_latent_model.py --data DIR --out reference-latent

It learns as the reference model does (``train_reference_model.py``), with its tokenizer, texts,
needle documents and curriculum; only the architecture and the designed start differ.

Dimensions: R latent rank, n and r the unrotated and rotated dims of a head's keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from train_needle_model import MAX_POSITION
from train_reference_model import (
    BAG,
    CONSTANT,
    EMBEDDING,
    PREVIOUS,
    SECOND,
    Batches,
    start_embeddings,
)
from training_loop import Recipe, make_parser, train
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast


def build_latent_model(tokenizer: PreTrainedTokenizerFast) -> DeepseekV2ForCausalLM:
    """A DeepSeek-V2 without experts: 16 heads, a latent of 128 and a rotated key of 32."""
    config = DeepseekV2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        kv_lora_rank=128,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        # As wide as keys are: PyTorch's fast attention on CPUs wants it so.
        v_head_dim=64,
        # All layers are dense.
        first_k_dense_replace=LAYERS,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.06,
    )
    model = DeepseekV2ForCausalLM(config)
    start_near_recall(model)
    return model


LAYERS = 4
# Layers that begin with heads that look for what came before; the last one is free.
SEARCHING = range(1, LAYERS - 1)
# At the start the latents of these layers hold tokens, two heads' keys and the bag.
TOKEN, KEYS, BAGS = slice(0, 48), (slice(48, 80), slice(80, 112)), slice(112, 128)
# Latents are normalized: this brings them back to about the size of what they are made from.
LATENT_SIZE = 1.4


@torch.no_grad()
def start_near_recall(model: DeepseekV2ForCausalLM) -> None:
    """As for the reference model, for heads that share one latent; all is trained.

    In the first layer, three heads copy the tokens one and two back and a blurred bag of the last
    dozen. In the layers of ``SEARCHING``, two heads start as induction heads and one attends to
    places with a similar bag; the other 13, and all of the last layer, start random.
    """
    embedding = start_embeddings(model)
    read = torch.linalg.qr(torch.randn(EMBEDDING.stop, 64)).Q.T
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.mul_(0.03)
        layer.mlp.down_proj.weight.mul_(0.05)
        if number == 0:
            _look_back(layer.self_attn, embedding, read)
        elif number in SEARCHING:
            _search(layer.self_attn, read)


def _parts(attention: Any) -> tuple[torch.Tensor, ...]:
    """Views of weights: queries ``[H, n + r, C]``, rows ``[R + r, C]``, ``[H, n + v, R]`` and
    outputs ``[C, H, v]``."""
    heads, rank = attention.num_heads, attention.kv_lora_rank
    return (
        attention.q_proj.weight.view(heads, attention.qk_head_dim, -1),
        attention.kv_a_proj_with_mqa.weight,
        attention.kv_b_proj.weight.view(heads, -1, rank),
        attention.o_proj.weight.view(-1, heads, attention.v_head_dim),
    )


def _look_back(attention: nn.Module, embedding: torch.Tensor, read: torch.Tensor) -> None:
    """First-layer heads that look 1 and 2 tokens back, and one that looks over the last dozen."""
    query, row, expand, output = _parts(attention)
    config = attention.config
    rank, nope, rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    row *= 0.2
    row[: EMBEDDING.stop, EMBEDDING] += torch.eye(EMBEDDING.stop)
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(0, rope, 2) / rope)
    sharp, broad = torch.zeros(rope // 2), torch.zeros(rope // 2)
    # Fast frequencies single out one offset; slower ones fall off over a dozen tokens.
    sharp[:4], broad[1:6] = torch.tensor([6.0, 3.0, 2.0, 1.0]) / 12, 0.2
    constant = (embedding[:, CONSTANT] / embedding.pow(2).mean(-1).sqrt()).mean()
    # One rotated key for all heads; what differs lies in their queries.
    strength = 8.0 / constant
    row[rank::2, CONSTANT] = strength
    scale = (nope + rope) ** 0.5 / (strength * constant**2)
    for head, (target, offset, shares, logit) in enumerate(
        ((PREVIOUS, 1, sharp, 40.0), (SECOND, 2, sharp, 40.0), (BAG, 3, broad, 12.0))
    ):
        query[head] *= 0.2
        query[head, nope::2, CONSTANT] = logit * scale * shares * torch.cos(offset * angles)
        query[head, nope + 1 :: 2, CONSTANT] = -logit * scale * shares * torch.sin(offset * angles)
        expand[head] *= 0.1
        expand[head, nope:, : EMBEDDING.stop] += read
        size = target.stop - target.start
        output[target] *= 0.1
        output[target, head] += 0.1 * torch.eye(attention.v_head_dim)[:size]


def _search(attention: nn.Module, read: torch.Tensor) -> None:
    """Two heads that look for the same two tokens, one for a similar bag; all write tokens back."""
    query, row, expand, output = _parts(attention)
    nope, size = attention.qk_nope_head_dim, TOKEN.stop
    row[: attention.kv_lora_rank] *= 0.2
    row[TOKEN, EMBEDDING] += read[:size]
    for head, place in enumerate((*KEYS, BAGS)):
        wide = place.stop - place.start
        query[head] *= 0.2
        expand[head] *= 0.1
        if place is BAGS:
            bag = 0.16 * torch.randn(wide, BAG.stop - BAG.start)
            row[place, BAG] += bag
            query[head, :wide, BAG] += bag
        else:
            newest, older = (0.14 * torch.randn(wide, 48) for _ in range(2))
            row[place, PREVIOUS] += newest
            row[place, SECOND] += older
            # The first layer copies a vector of about twice the token's own size.
            query[head, :wide, EMBEDDING] += 2.0 * newest @ read[:48]
            query[head, :wide, PREVIOUS] += older
        expand[head, :wide, place] += KEY_GAIN * LATENT_SIZE * torch.eye(wide)
        expand[head, nope : nope + size, TOKEN] += LATENT_SIZE * torch.eye(size)
        output[EMBEDDING, head, :size] += 0.1 * read[:size].T


# A head's queries and keys have few unrotated dims, half of the reference's.
KEY_GAIN = 2.5


def main() -> None:
    options = make_parser(__doc__.splitlines()[0], "reference-latent", 6e6)
    train(options.parse_args(), Recipe(build_latent_model, Batches))


if __name__ == "__main__":
    main()
