"""Calls of ``generate``: each is served right, or refused at once with what it is and a way out."""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache, attach
from hf_kvret.generate.checks import check_options_are_read, why_not
from hf_kvret.generate.requests import Request
from hf_kvret.methods.known import METHODS
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores import store_names
from hf_kvret.testing import COVERING_OPTIONS, MODELS, REFUSED
from hf_kvret.testing.scenario import prompt

from .filled_caches import RUN, new_cache

LEN = 120
PARIS: dict[str, Any] = {"cache_implementation": "paris", "cache_config": COVERING_OPTIONS}
EMPTY = r"row 1 of the prompt has no token, only padding: give it .*bos_token_id"
RIGHT = r"padded on the right in row 1.*padding_side = 'left'"
SHAPE = r"attention_mask is of shape .*the prompt has 2 rows of 120 tokens"
FORM = "custom 4D masks and others are not supported"


@pytest.fixture
def filled(model: PreTrainedModel) -> FlatKVCache:
    """A cache that holds 43 tokens; tests take forks of it."""
    cache = new_cache(model)
    model.generate(prompt(1, 40), past_key_values=cache, **RUN)
    return cache


def masked(row: int, start: int, stop: int) -> torch.Tensor:
    mask = torch.ones(2, LEN, dtype=torch.long)
    mask[row, start:stop] = 0
    return mask


LEFT, HOLE = masked(1, 0, 20), masked(1, 50, 70)


def cached(model: PreTrainedModel, ids: torch.Tensor, mask: Any, **more: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        ids, attention_mask=mask, past_key_values=new_cache(model), **RUN, **more
    )
    return tokens


@pytest.mark.parametrize(
    "mask", [LEFT & HOLE, LEFT.bool(), HOLE.float(), LEFT * 3, masked(1, 0, 119)]
)
def test_padding_on_the_left_and_holes_are_served_in_any_dtype(
    mask: torch.Tensor, model: PreTrainedModel
) -> None:
    ids = prompt(2, LEN)
    expected = model.generate(ids, attention_mask=mask, **RUN)
    assert torch.equal(cached(model, ids, mask), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masked(1, 0, LEN), EMPTY),
        (masked(1, 110, LEN) & HOLE, RIGHT),
        ((LEFT - 1) * 1e9, "negative numbers or NaN, as one that is added to scores"),
        (LEFT[:, 5:], SHAPE),
        (torch.ones(2, 1, LEN, LEN).tril(), FORM),
    ],
)
def test_other_masks_are_refused_by_what_they_are(
    mask: torch.Tensor, message: str, model: PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match=message):
        cached(model, prompt(2, LEN), mask)
    with pytest.raises(ValueError, match=message):
        model.generate(prompt(2, LEN), attention_mask=mask, **PARIS, **RUN)


@pytest.mark.parametrize(("shape", "masked_too"), [((1, 0), True), ((2, 0), False), ((0, 5), True)])
def test_a_prompt_without_tokens_is_refused(
    shape: tuple[int, int], masked_too: bool, model: PreTrainedModel
) -> None:
    ids = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"has no token: give each row at least one"):
        cached(model, ids, torch.ones_like(ids) if masked_too else None)


def test_embeddings_are_checked_by_their_own_length(model: PreTrainedModel) -> None:
    run = {"inputs_embeds": model.get_input_embeddings()(prompt(2, LEN)), **RUN}
    expected = model.generate(attention_mask=LEFT, **run)
    got = model.generate(attention_mask=LEFT, past_key_values=new_cache(model), **run)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=EMPTY):
        model.generate(attention_mask=masked(1, 0, LEN), past_key_values=new_cache(model), **run)


def test_a_row_without_a_new_token_is_named_in_a_second_turn(model: PreTrainedModel) -> None:
    cache = new_cache(model)
    first = model.generate(prompt(2, LEN), attention_mask=LEFT, past_key_values=cache, **RUN)
    ids = torch.cat([first, prompt(2, 9)], dim=1)
    mask = torch.cat([LEFT, torch.ones(2, ids.shape[1] - LEN, dtype=torch.long)], dim=1)
    mask[1, cache.get_seq_length() :] = 0
    run = {"attention_mask": mask, **RUN}
    with pytest.raises(ValueError, match="row 1 of the prompt has no token behind those that"):
        model.generate(ids, past_key_values=cache, **run)
    mask[1, -1] = 1
    expected = model.generate(ids, **run)
    assert torch.equal(model.generate(ids, past_key_values=cache, **run), expected)


def embedded(model: Any, length: int) -> dict[str, torch.Tensor]:
    """Embeddings of new tokens alone, beside a mask of all."""
    embeds = model.get_input_embeddings()(prompt(1, length)).detach()
    return {"inputs_embeds": embeds, "attention_mask": torch.ones(1, 43 + length).long()}


# What a call is given, by the model and a filled cache, and the words of its refusal.
REFUSALS: list[tuple[Callable[[Any, Any], dict[str, Any]], str]] = [
    (lambda m, f: {"past_key_values": f, "inputs": prompt(1, 1)}, "inputs has 1 tokens.* whole"),
    (lambda m, f: {"past_key_values": f, "input_ids": prompt(1, 43)}, "input_ids has 43 tokens,"),
    (
        lambda m, f: PARIS | {"assistant_model": type("Gemma4Assistant", (type(m),), {})(m.config)},
        "Gemma4Assistant reads keys and values of all .* take another",
    ),
    (lambda m, f: {"past_key_values": f, "bos_token_id": 1}, "input_ids has 0 tokens, past_key"),
    (lambda m, f: {"past_key_values": f, "prefill_chunk_size": 0}, "prefill_chunk_size=0: give"),
    (lambda m, f: PARIS | {"prefill_chunk_size": [9, 7]}, r"prefill_chunk_size=\[9, 7\]: give"),
    (
        lambda m, f: {"past_key_values": f, **embedded(m, 6)},
        "inputs_embeds has 6 tokens, past_key_values holds 43",
    ),
    *(
        (
            lambda m, f, drafts=drafts: {
                "past_key_values": f,
                "inputs": prompt(1, 60),
                drafts: copy.copy(m) if drafts == "assistant_model" else 3,
            },
            "again, also the 43 tokens .*leave out assistant.* use_mtp for",
        )
        for drafts in ("assistant_model", "prompt_lookup_num_tokens", "use_mtp")
    ),
    (lambda m, f: {"past_key_values": DynamicCache(config=m.config), **PARIS}, "a DynamicCache, "),
    (lambda m, f: {"past_key_values": f, "cache_implementation": "paris"}, "'paris' asks for an"),
    (lambda m, f: {"past_key_values": f, "cache_config": {"top_k": 64}}, "FlatKVCache, so nothing"),
    (lambda m, f: {"cache_config": {"top_k": 64}}, "cache_config=.*nothing would read it.*paris"),
    (lambda m, f: {"generation_config": GenerationConfig(cache_config={"top_k": 64})}, "no cache"),
    *(
        (
            lambda m, f, name=name, option=option: {
                "cache_implementation": name,
                "cache_config": {option: True},
            },
            f"but '{name}' is a cache of transformers, so nothing would read it",
        )
        for name in ("static", "dynamic", "offloaded", "quantized")
        for option in ("lossless", "shelf", "predictor")
    ),
    (
        lambda m, f: {**PARIS, "generation_config": GenerationConfig(lossless=True, rank=8)},
        "the generation config has lossless, rank, .* move them into its cache_config",
    ),
    (lambda m, f: {"past_key_values": new_cache(m), "use_cache": False}, "contradicts the cache:"),
    (lambda m, f: {**PARIS, "generation_config": GenerationConfig(use_cache=False)}, "='paris': d"),
    (
        lambda m, f: {"past_key_values": FlatKVCache(MODELS["smollm3"].config())},
        "past_key_values was made for a model of 3 layers, LlamaForCausalLM has 2",
    ),
    (lambda m, f: {"past_key_values": "paris"}, "'paris' is no cache: name a method by cache_impl"),
    (lambda m, f: {"cache": ParisKVCache}, "ParisKVCache'> is no cache: .* or pass a cache, as "),
    (lambda m, f: {**PARIS, "cache_config": {4: 4}}, "a dict of options by name, got {4: 4}"),
]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_a_call_that_can_not_be_served_is_refused_and_changes_nothing(
    number: int, model: PreTrainedModel, filled: FlatKVCache
) -> None:
    given, words = REFUSALS[number]
    cache, base = filled.fork(), model.config._attn_implementation
    arguments = {"inputs": prompt(1, 20), **given(model, cache)}
    if {"input_ids", "inputs_embeds", "bos_token_id"} & arguments.keys():
        del arguments["inputs"]
    error = TypeError if "no cache: " in words or "dict of" in words else ValueError
    with pytest.raises(error, match=words):
        model.generate(**RUN, **arguments)
    assert cache.get_seq_length() == 43 and model.config._attn_implementation == base


def test_all_reasons_are_given_at_once(model: PreTrainedModel, filled: FlatKVCache) -> None:
    given = {"inputs": prompt(1, 5), "past_key_values": filled}
    config = GenerationConfig(use_cache=False, output_attentions=True)
    reasons = why_not(Request(model, given), filled, config, None)
    words = ("has 5 tokens", "use_cache=False", "output_attentions=True")
    assert [word in reason for word, reason in zip(words, reasons, strict=True)] == [True] * 3


def test_a_models_own_settings_are_refused_with_the_way_out(llama: PreTrainedModel) -> None:
    own: Any = llama.generation_config
    own.use_cache, own.lossless, own.prompt = False, True, None
    words = r"has lossless, .* or model\.generation_config's; set .* None\n.*so pass use_cache=True"
    for given in ({"past_key_values": new_cache(llama)}, PARIS):
        with pytest.raises(ValueError, match=words):
            llama.generate(prompt(1, 40), **given, **RUN)


def test_a_quantized_cache_keeps_options_that_a_users_method_has_too(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_dataclass("Options", [("nbits", int, 4)], bases=(RetrievalConfig,), frozen=True)
    monkeypatch.setitem(METHODS, "mine", type("Mine", (FlatKVCache,), {"Config": options}))
    given = {"cache_implementation": "quantized", "cache_config": {"nbits": 4}}
    check_options_are_read(Request(model, given), GenerationConfig(**given), None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk": 5}, "no option 'topk': did you mean 'top_k'?"),
        ({"store": "hots"}, f"store='hots': choose one of {store_names()}"),
    ],
)
def test_bad_options_are_refused_in_every_way_to_give_them(
    llama: PreTrainedModel, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ParisKVCache(config=llama.config, **options)
    with pytest.raises(ValueError, match=re.escape(words)):
        llama.generate(prompt(1, 30), **RUN, cache_implementation="paris", cache_config=options)
    llama.generation_config.cache_config = options
    with pytest.raises(ValueError, match=re.escape(words)):
        llama.generate(prompt(1, 30), **RUN, cache_implementation="paris")


REASONS = {
    "falcon": "computes attention by itself and ignores",
    "t5": "is an encoder-decoder",
    "mamba": "no full-attention layer",
    "mistral_sliding": "no full-attention layer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused_with_the_reason(name: str) -> None:
    model = REFUSED[name]()
    before = getattr(model.config, "_attn_implementation", None)
    passes: list[Any] = []
    model.register_forward_pre_hook(lambda *_: passes.append(name))
    requests: list[Callable[[], Any]] = [lambda: attach(model)]
    for method in ("flat", "paris"):
        run = {**RUN, "cache_implementation": method, "decoder_start_token_id": 0}
        requests.append(partial(model.generate, prompt(1, 30), **run))
    if name != "falcon":
        requests.append(lambda: FlatKVCache(model.config))
    for request in requests:
        with pytest.raises(ValueError, match=REASONS[name]) as raised:
            request()
        assert "cache_implementation" in str(raised.value), "the message says what to use instead"
        assert not passes, "the model ran before it was refused"
    assert getattr(model.config, "_attn_implementation", None) == before


def test_continuous_batching_refuses_retrieval(llama: PreTrainedModel) -> None:
    words = r"generate_batch keeps a paged cache.*hf_kvret\.restore\(model\)"

    def refused(**options: Any) -> None:
        config = GenerationConfig(max_new_tokens=2, eos_token_id=-1, **options)
        with pytest.raises(ValueError, match=words):
            llama.generate_batch(inputs=[[5, 6, 7]], generation_config=config, progress_bar=False)
        with pytest.raises(ValueError, match=words):
            llama.init_continuous_batching(generation_config=config)

    # Keywords that `generate_batch` itself drops.
    given = {"past_key_values": FlatKVCache(llama.config)}
    calls = [partial(llama.generate_batch, [[5, 6, 7]], **one) for one in (PARIS, given)]
    calls.append(partial(llama.generate, prompt(1, 3), cache_implementation="paged", **given))
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call()
    refused(cache_implementation="paris")
    refused(cache_config={"top_k": 64})
    llama.generation_config.cache_implementation = "flat"
    refused()
    llama.generation_config.cache_implementation = None
    attach(llama)
    refused()


def test_a_models_own_cache_config_is_left_alone(llama: PreTrainedModel) -> None:
    """It belongs to a name that another call gives, or that the model was loaded with."""
    expected = llama.generate(prompt(1, 20), **RUN)
    llama.generation_config.cache_config = {"top_k": 64}
    llama.set_attn_implementation("paris")
    calls: list[dict[str, Any]] = [
        {"use_cache": False},
        {"past_key_values": DynamicCache(config=llama.config)},
        {"past_key_values": StaticCache(config=llama.config, max_cache_len=60)},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static", "cache_config": {"max_cache_len": 60}},
        {},
    ]
    for more in calls:
        assert torch.equal(llama.generate(prompt(1, 20), **RUN, **more), expected)
    hf_kvret.restore(llama)
    assert torch.equal(llama.generate(prompt(1, 20), **RUN), expected)


def test_attach_warns_once_of_others_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def forward(self, *args, **kwargs):\n    return whole(self, *args, **kwargs)\n"
    attention = type(model.model.layers[0].self_attn)
    theirs = {"__name__": "tri_tier.patch", "whole": attention.forward}
    exec(code, theirs)
    monkeypatch.setattr(attention, "forward", theirs["forward"])
    with pytest.warns(UserWarning, match=r"tri_tier\.patch has replaced .* LlamaAttention"):
        attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(MODELS["llama"].build())
