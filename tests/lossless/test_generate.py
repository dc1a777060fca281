"""``generate`` with ``lossless``: full attention's text, rows and scores."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_kvret
import hf_kvret.generate.lossless as lossless_call
from hf_kvret import ParisKVCache
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.generate.requests import Request
from hf_kvret.lossless.pace import GivenPace
from hf_kvret.methods.paris.index import ParisIndex
from hf_kvret.models.versions import as_argument, cache_of

OPTIONS: dict[str, Any] = {
    **{"top_k": 4, "sink": 2, "recent": 8, "flush": 8, "dense_below": 0, "lossless": True}
}
METHODS = ("flat", "paris", "lrqk", "ctkvr")
PROMPT_LEN, NEW_TOKENS = 90, 8


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    # Attention is sharp, so what is not selected is missed.
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25, pad_token_id=0,
        eos_token_id=None, bos_token_id=1,
    )  # fmt: skip
    yield (built := LlamaForCausalLM(config).eval())
    hf_kvret.restore(built)


@pytest.fixture(autouse=True)
def _five_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that would be fastest depends on times."""
    monkeypatch.setattr(lossless_call, "_pace", lambda *arguments: GivenPace(5, None))


def prompt(length: int = PROMPT_LEN, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 32, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor | None, seed: int = 7, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    arguments = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **arguments}
    # Without a mask `generate` would take generated padding ids for padding.
    mask = {} if ids is None else {"attention_mask": torch.ones_like(ids)}
    given = {} if ids is None else {"input_ids": ids, **mask}
    return model.generate(**{**given, **arguments})


def lossless(method: str = "paris", **changes: Any) -> dict[str, Any]:
    return {"cache_implementation": method, "cache_config": {**OPTIONS, **changes}}


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8},
    "top_p": {"do_sample": True, "top_p": 0.7, "top_k": 9, "temperature": 3.0},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "forced": {"forced_eos_token_id": 5, "suppress_tokens": [3, 4], "bad_words_ids": [[9]]},
    "chunks": {"prefill_chunk_size": 37},
    "two_tokens": {"max_new_tokens": 2},
    "end_of_text": {"eos_token_id": list(range(2, 12)), "do_sample": True},
}


@pytest.mark.parametrize(
    ("name", "method"), [(name, METHODS[i % len(METHODS)]) for i, name in enumerate(CALLS)]
)
def test_text_is_full_attentions_with_the_same_seed(model: Any, name: str, method: str) -> None:
    full = generate(model, prompt(), **CALLS[name])
    ours = generate(model, prompt(), **CALLS[name], **lossless(method))
    assert torch.equal(ours.sequences, full.sequences)


@pytest.mark.parametrize("length", [1, 5, 15])
def test_the_first_cold_tokens_may_come_in_decoding(model: Any, length: int) -> None:
    more = {"max_new_tokens": 40, "output_logits": True}
    full = generate(model, prompt(length), **more)
    ours = generate(model, prompt(length), **more, **lossless())
    for one, other in zip(ours.logits, full.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_settings_of_drafts_count_and_defaults_do_not() -> None:
    # Pipelines of transformers before 5.20 pass a config with all its defaults.
    usual: dict[str, Any] = GenerationConfig._get_default_generation_params()
    count, confidence = "num_assistant_tokens", "assistant_confidence_threshold"
    cases: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = [
        ({}, {}, [None, None]),
        ({count: 1}, {}, [1, None]),
        (usual, usual, [None, None]),
        (usual | {count: 3}, {}, [3, None]),
        ({}, usual | {confidence: 0.3}, [None, 0.3]),
        (usual, {count: 20}, [20, None]),
    ]
    for of_model, of_call, expected in cases:
        model: Any = SimpleNamespace(generation_config=GenerationConfig(**of_model))
        call = Request(model, {"generation_config": GenerationConfig(**of_call)})
        merged = GenerationConfig(**usual | of_model | of_call)
        assert [lossless_call._own(call, merged, name) for name in (count, confidence)] == expected
    model.generation_config = GenerationConfig(cache_config={"top_k": 8})
    for theirs, is_theirs in (({"top_k": 8}, False), ({"top_k": 9}, True)):
        copied = GenerationConfig(cache_config=theirs)
        assert Request(model, {"generation_config": copied}).sets("cache_config") == is_theirs


def test_scores_logits_and_hidden_states_are_there_for_every_token(model: Any) -> None:
    more = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    full = generate(model, prompt(), temperature=0.7, do_sample=True, **more)
    ours = generate(model, prompt(), temperature=0.7, do_sample=True, **more, **lossless())
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(ours[name]), torch.stack(full[name]), atol=1e-4, rtol=0
        )
    for one, other in zip(ours.hidden_states[1:], full.hidden_states[1:], strict=True):
        for state, expected in zip(one, other, strict=True):
            torch.testing.assert_close(state, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("method", "drafts"), [("flat", 1), ("lrqk", 16), ("ctkvr", 5)])
def test_rows_are_those_that_full_attention_leaves(
    model: Any, method: str, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless_call, "_pace", lambda *arguments: GivenPace(drafts, None))
    full = cache_of(generate(model, prompt()))
    ours = cache_of(generate(model, prompt(), **lossless(method)))
    assert ours.get_seq_length() == full.get_seq_length()
    for layer, expected in zip(ours.layers, full.layers, strict=True):
        torch.testing.assert_close(layer.keys.clone(), expected.keys, atol=2e-5, rtol=0)
        torch.testing.assert_close(layer.values.clone(), expected.values, atol=2e-5, rtol=0)
    assert ours.input_ids.shape[1] == ours.get_seq_length()


class Streamed(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        pass


def test_a_streamer_gets_one_token_at_a_time(model: Any) -> None:
    streamer = Streamed()
    ours = generate(model, prompt(), streamer=streamer, **lossless())
    assert [len(one) for one in streamer.puts[1:]] == [1] * NEW_TOKENS
    tokens = [token for one in streamer.puts for token in one]
    assert tokens == ours.sequences[0].tolist()


def test_the_callers_processors_are_called_once_a_token(model: Any) -> None:
    calls: list[int] = []

    def counting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        return scores.roll(len(calls), dims=-1)

    full = generate(model, prompt(), logits_processor=[counting])
    expected, calls[:] = list(calls), []
    ours = generate(model, prompt(), logits_processor=[counting], **lossless())
    assert calls == expected
    assert torch.equal(ours.sequences, full.sequences)


def test_a_stopping_criterion_ends_the_text_where_it_would_end(model: Any) -> None:
    criteria = StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 95])])
    ours = generate(model, prompt(), stopping_criteria=criteria, **lossless())
    assert ours.sequences.shape[1] == 95
    assert cache_of(ours).get_seq_length() == 94


def test_turns_forks_crops_and_saved_caches_go_on(model: Any, tmp_path: Path) -> None:
    cache = ParisKVCache(model.config, **OPTIONS, store="host")
    first = generate(model, prompt(), **as_argument(cache)).sequences
    talk = torch.cat([first, prompt(9, seed=2)], dim=1)
    twin = cache.fork()
    cache.save_pretrained(tmp_path, model=model)
    loaded = ParisKVCache.from_pretrained(tmp_path, model.config, model=model)
    assert loaded.options.lossless
    expected = generate(model, talk, do_sample=True).sequences
    for each in (cache, twin, loaded):
        result = generate(model, talk, do_sample=True, **as_argument(each))
        assert torch.equal(result.sequences, expected)
        assert each.rounds.drafted
    cache.crop(talk.shape[1] - 20 - cache.get_seq_length())
    again = torch.cat([talk[:, :-20], prompt(5, seed=3)], dim=1)
    expected = generate(model, again).sequences
    assert torch.equal(generate(model, again, **as_argument(cache)).sequences, expected)


def test_a_prompt_of_embeddings_or_with_padding_is_served(model: Any) -> None:
    embeds = model.get_input_embeddings()(prompt())
    full = generate(model, None, inputs_embeds=embeds, repetition_penalty=1.2)
    ours = generate(model, None, inputs_embeds=embeds, repetition_penalty=1.2, **lossless())
    assert torch.equal(ours.sequences, full.sequences)
    padded = torch.nn.functional.pad(prompt(), (6, 0))
    mask = (padded != 0).long()
    full = generate(model, padded, attention_mask=mask)
    ours = generate(model, padded, attention_mask=mask, **lossless())
    assert torch.equal(ours.sequences, full.sequences)


def test_a_prompt_from_a_shelf_is_gone_on_with(model: Any, tmp_path: Path) -> None:
    shelf = {"shelf": str(tmp_path), "shelf_step": 64}
    text = prompt(200)
    generate(model, text[:, :180], max_new_tokens=1, **lossless(**shelf))
    ours = generate(model, text, **lossless(**shelf))
    assert cache_of(ours).from_shelf
    assert torch.equal(ours.sequences, generate(model, text).sequences)


def test_stats_count_drafts_and_exact_passes_apart(model: Any) -> None:
    cache = cache_of(generate(model, prompt(), **lossless()))
    counts = cache.stats()["lossless"]
    assert counts["accepted"] + counts["rounds"] + counts["exact_steps"] == NEW_TOKENS - 1
    assert counts["rounds"] and counts["drafted"] >= counts["accepted"]
    assert cache.fork().stats()["lossless"]["rounds"] == 0
    assert "lossless" not in cache.fork(lossless=False).stats()


@pytest.mark.parametrize(
    ("more", "words"),
    [({"num_beams": 2}, "beams"), ({"num_return_sequences": 2, "do_sample": True}, "2 sequences")],
)
def test_calls_that_gain_nothing_are_refused(model: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"lossless=True: .*{words}.*dynamic"):
        generate(model, prompt(), **more, **lossless())


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("paris", {"prompt": "retrieve"}, "prompt='retrieve'"),
        ("paris", {"store": "higgs"}, "store='higgs'"),
        ("h2o", {}, "gives tokens up"),
        ("aqua", {"predictor": None}, "in codes"),
    ],
)
def test_options_that_keep_no_exact_rows_are_refused(
    model: Any, method: str, options: dict[str, Any], words: str
) -> None:
    cls = hf_kvret.registered_methods()[method]
    with pytest.raises(ValueError, match=f"lossless=True: .*{words}"):
        cls(model.config, lossless=True, **options)


def test_a_call_that_breaks_off_leaves_what_was_read(model: Any) -> None:
    cache = ParisKVCache(model.config, **OPTIONS)

    def late(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > PROMPT_LEN + 4:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        generate(model, prompt(), logits_processor=[late], **as_argument(cache))
    assert cache.get_seq_length() == PROMPT_LEN + 5
    more = torch.cat([cache.input_ids, prompt(3, seed=4)], dim=1)
    expected = generate(model, more).sequences
    assert torch.equal(generate(model, more, **as_argument(cache)).sequences, expected)


def test_an_index_of_rubbish_changes_no_answer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rubbish(self: Any, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        shape = (len(query), 2, query.shape[2], cold.budget)
        return torch.arange(cold.budget, dtype=torch.int32).expand(shape).contiguous()

    full = generate(model, prompt(), do_sample=True).sequences
    monkeypatch.setattr(ParisIndex, "search", rubbish)
    monkeypatch.setattr(ParisIndex, "host_search", lambda *arguments: None)
    ours = generate(model, prompt(), do_sample=True, **lossless())
    assert torch.equal(ours.sequences, full)
