"""A call of ``generate``: what a failed one leaves, and passes without its retrieval cache."""

import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, LogitsProcessor, PreTrainedModel

import hf_kvret
from hf_kvret.models.versions import as_argument, cache_of
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.models import TinyModel
from hf_kvret.testing.scenario import prompt, ragged

from .filled_caches import new_cache

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


def test_a_cache_that_stayed_dense_says_so(llama: PreTrainedModel) -> None:
    cache = hf_kvret.ParisKVCache(llama.config)
    assert cache.stats()["dense"] is None, "nothing was held yet"
    llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    assert cache.stats()["dense"] == (
        "ParisKVCache retrieved nothing: it attends to all tokens below "
        "dense_below=2308, and held 43"
    )
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    assert cache.stats()["dense"] is None


def test_a_call_owns_its_cache_until_it_is_over(llama: PreTrainedModel) -> None:
    """Calls whose passes take turns would mix two texts: the second one is refused at once."""
    ids = prompt(1, 60)
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    answer = llama.generate(ids, past_key_values=cache, **RUN)
    more = [torch.cat([answer, prompt(1, 9, salt=salt)], dim=1) for salt in (1, 2)]
    plain = llama.generate(more[0], **RUN)
    twin = cache.fork()
    entered, refused = threading.Event(), threading.Event()

    class Waits(LogitsProcessor):
        """Lets the other call begin between two passes."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            entered.set()
            assert refused.wait(60)
            return scores

    def second() -> None:
        entered.wait(60)
        with pytest.raises(RuntimeError, match="another thread is in a call of generate"):
            llama.generate(more[1], past_key_values=cache, **RUN)
        results.append(llama.generate(more[1], past_key_values=twin, **RUN))
        refused.set()

    results: list[torch.Tensor] = []
    thread = threading.Thread(target=second)
    thread.start()
    call = {"past_key_values": cache, "logits_processor": [Waits()]}
    assert torch.equal(llama.generate(more[0], **call, **RUN), plain)
    thread.join()
    assert torch.equal(results[0], llama.generate(more[1], **RUN))
    again = torch.cat([plain, more[0]], dim=1)
    expected = llama.generate(again, **RUN)
    assert torch.equal(llama.generate(again, past_key_values=cache, **RUN), expected)


GREEDY: dict[str, Any] = {"do_sample": False}
# Every pass reads the whole text, with the frequencies of its length: before 5.20 transformers
# itself loses the text where it crosses the limit with a cache.
TRUTH: dict[str, Any] = {**GREEDY, "use_cache": False}
LIMIT = 64


def phi(kind: str = "phi3") -> PreTrainedModel:
    """A model that reads its text anew at ``LIMIT`` tokens, with other frequencies of its RoPE."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0}
    rope |= {"original_max_position_embeddings": LIMIT, "short_mscale": 1.0, "long_mscale": 1.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = partial(
        AutoConfig.for_model, kind, vocab_size=128, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, original_max_position_embeddings=LIMIT, rope_parameters=rope,
        sliding_window=None, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return TinyModel(kind, config, (0, 1)).build()


@pytest.mark.parametrize("options", [{}, {"lossless": True}])
@pytest.mark.parametrize(
    ("kind", "prompt_len"), [("phimoe", LIMIT - 20), ("phi3", LIMIT - 1), ("phi3", LIMIT)]
)
def test_a_text_that_is_read_anew_at_a_limit_stays_in_the_cache(
    kind: str, prompt_len: int, options: dict[str, Any]
) -> None:
    ids = prompt(1, prompt_len)
    expected = phi(kind).generate(ids, max_new_tokens=24, **TRUTH)
    named = {"cache_implementation": "flat", "cache_config": {**COVERING_OPTIONS, **options}}
    result = phi(kind).generate(
        ids, max_new_tokens=24, return_dict_in_generate=True, **named, **GREEDY
    )
    assert torch.equal(result.sequences, expected)
    cache = cache_of(result)
    assert cache.get_seq_length() == prompt_len + 23
    assert cache.identity is not None
    assert torch.equal(cache.tokens.ids(prompt_len + 23), expected[:, :-1].int())


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"attention_mask": ragged((LIMIT - 30, LIMIT - 8))[1]},
    ],
    ids=lambda mode: "-".join(mode),
)
def test_the_limit_is_crossed_in_every_mode(mode: dict[str, Any]) -> None:
    ids = ragged((LIMIT - 30, LIMIT - 8))[0] if "attention_mask" in mode else prompt(1, LIMIT - 12)
    drafts = "prompt_lookup_num_tokens" in mode
    expected = phi().generate(ids, max_new_tokens=30, **({} if drafts else mode), **TRUTH)
    model = phi()
    cache = new_cache(model)
    tokens = model.generate(ids, max_new_tokens=30, past_key_values=cache, **mode, **GREEDY)
    assert torch.equal(tokens, expected)
    assert cache.get_seq_length() >= tokens.shape[1] - 1


def test_the_limit_is_crossed_in_a_second_turn() -> None:
    model = phi()
    cache, tokens = new_cache(model), torch.empty(1, 0, dtype=torch.long)
    for length in (LIMIT - 30, 40, 7):
        ids = torch.cat([tokens, prompt(1, length)], dim=1)
        expected = phi().generate(ids, max_new_tokens=5, **TRUTH)
        tokens = model.generate(ids, max_new_tokens=5, past_key_values=cache, **GREEDY)
        assert torch.equal(tokens, expected)
        assert cache.get_seq_length() == tokens.shape[1] - 1


def make_unfaithful(model: PreTrainedModel, from_pass: int, cache: Any) -> None:
    """Have the passes of a model use another ``cache`` from one on, or none."""
    forward, passes = model.forward, count()

    def unfaithful(*args: Any, **kwargs: Any) -> Any:
        if next(passes) >= from_pass:
            kwargs.update(as_argument(cache))
        return forward(*args, **kwargs)

    model.forward = unfaithful


@pytest.mark.parametrize(
    ("make", "from_pass", "mode"),
    [
        (lambda: None, 0, {}),
        (DynamicCache, 1, {"num_beams": 2}),
        (DynamicCache, 3, {"prompt_lookup_num_tokens": 2}),
    ],
)
def test_a_model_that_takes_another_cache_is_an_error(
    llama: PreTrainedModel, make: Any, from_pass: int, mode: dict[str, Any]
) -> None:
    make_unfaithful(llama, from_pass, make())
    cache = new_cache(llama)
    with pytest.raises(ValueError, match="without the cache of this call"):
        llama.generate(prompt(1, 40), past_key_values=cache, max_new_tokens=9, **mode, **GREEDY)


@pytest.mark.parametrize("whole_passes", [0, 2])
def test_layers_that_do_not_get_the_cache_are_an_error_at_once(
    llama: PreTrainedModel, whole_passes: int
) -> None:
    passes: list[None] = []
    llama.register_forward_pre_hook(lambda *arguments: passes.append(None))

    def without_cache(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | (as_argument(None) if len(passes) > whole_passes else {})

    for layer in llama.model.layers:
        layer.register_forward_pre_hook(without_cache, with_kwargs=True)
    with pytest.raises(ValueError, match="added no token to the cache"):
        llama.generate(prompt(1, 40), past_key_values=new_cache(llama), max_new_tokens=4, **GREEDY)


def test_a_loop_of_the_callers_that_leaves_the_cache_out_is_an_error(
    llama: PreTrainedModel,
) -> None:
    def careless(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for _ in range(3):
            logits = model(input_ids, use_cache=False).logits[:, -1:]
            input_ids = torch.cat([input_ids, logits.argmax(-1)], dim=1)
        return input_ids

    with pytest.raises(ValueError, match=r"custom_generate=.* ran without the retrieval cache"):
        llama.generate(
            prompt(1, 40),
            past_key_values=new_cache(llama),
            custom_generate=careless,
            max_new_tokens=3,
            **GREEDY,
        )


def test_passes_of_a_logits_processor_are_its_own(llama: PreTrainedModel) -> None:
    class Asks(LogitsProcessor):
        """Adds what the model says without a cache, of this text or another."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            other = torch.cat([input_ids, input_ids.flip(1)], dim=1)
            for ids in (input_ids, other):
                scores = scores + llama(ids, use_cache=False).logits[:, -1]
            return scores

    run = {"max_new_tokens": 6, "logits_processor": [Asks()], **GREEDY}
    expected = llama.generate(prompt(1, 40), **run)
    cache = new_cache(llama)
    assert torch.equal(llama.generate(prompt(1, 40), past_key_values=cache, **run), expected)
    assert cache.get_seq_length() == 45


FOREIGN = """
HANDED = ("past_key_values", "cache", "cache_implementation", "cache_config")


def generate(model, inputs=None, **kwargs):
    handed = {name: x for name, x in kwargs.items() if name in HANDED}
    return model.generate(inputs, max_new_tokens=4, do_sample=False, **handed)
"""


@pytest.mark.parametrize(("by_name", "uses"), [(False, True), (True, True), (True, False)])
def test_a_generate_from_a_folder_uses_the_cache_or_is_an_error(
    llama: PreTrainedModel, tmp_path: Path, by_name: bool, uses: bool
) -> None:
    file = tmp_path / "custom_generate" / "generate.py"
    file.parent.mkdir()
    file.write_text(FOREIGN if uses else FOREIGN.replace(", **handed", ""))
    cache: dict[str, Any] = {"past_key_values": new_cache(llama)}
    if by_name:
        cache = {"cache_implementation": "flat", "cache_config": COVERING_OPTIONS}
    run = {"custom_generate": str(tmp_path), "trust_remote_code": True, **cache, **GREEDY}
    if uses:
        expected = llama.generate(prompt(1, 40), **RUN)
        assert torch.equal(llama.generate(prompt(1, 40), **run), expected)
    else:
        with pytest.raises(ValueError, match="ran without the retrieval cache"):
            llama.generate(prompt(1, 40), **run)
