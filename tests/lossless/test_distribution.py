"""Sampled tokens of lossless rounds have full attention's distribution."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_kvret

PROMPT_LEN, NEW_TOKENS, TEXTS, BINS = 90, 1000, 10, 64


def p_value(text: torch.Tensor, logits: torch.Tensor, temperature: float) -> float:
    """That of a chi-square test that tokens were drawn by ``logits [n, V]`` at a temperature.

    Tokens lie on the unit interval side by side, the most probable first, each as wide as its
    probability. A uniform point of the place of a token that was drawn is uniform itself.
    """
    shares, order = (logits.double() / temperature).softmax(-1).sort(-1, descending=True)
    place = (order == text[:, None]).long().argmax(-1, keepdim=True)
    widths, ends = (x.gather(1, place)[:, 0] for x in (shares, shares.cumsum(-1)))
    points = ends - widths * torch.rand(len(text), dtype=torch.float64)
    counts = torch.histc(points, BINS, 0, 1)
    expected = len(text) / BINS
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((BINS - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi_square / 2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "method", "temperature"),
    [("llama", "paris", 0.8), ("llama", "lrqk", 1.5), ("lfm2", "paris", 1.0)],
)
def test_draws_follow_full_attention(name: str, method: str, temperature: float) -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.25}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"layer_types": ["conv", "full_attention"]} if name == "lfm2" else {}
    config = AutoConfig.for_model(name, **size, **heads, **more, eos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval()
    options = {"top_k": 16, "sink": 2, "recent": 8, "flush": 8, "dense_below": 0, "lossless": True}
    texts, logits, drafted, accepted = [], [], 0, 0
    for _ in range(TEXTS):
        ids = torch.randint(2, 32, (1, PROMPT_LEN))
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=True,
            temperature=temperature, top_k=0, cache_implementation=method, cache_config=options,
            return_dict_in_generate=True,
        )  # fmt: skip
        rounds = result.past_key_values.stats()["lossless"]
        drafted, accepted = drafted + rounds["drafted"], accepted + rounds["accepted"]
        hf_kvret.restore(model)
        with torch.no_grad():
            full = model(result.sequences, use_cache=False).logits[0]
        texts.append(result.sequences[0, PROMPT_LEN:])
        logits.append(full[PROMPT_LEN - 1 : -1])
    text, full = torch.cat(texts), torch.cat(logits)
    # Drafts are accepted, and others rejected.
    assert 0 < accepted < drafted
    assert p_value(text, full, temperature) > 1e-4
    # The test would see a temperature that is off by a tenth.
    assert p_value(text, full, 1.1 * temperature) < 1e-4
