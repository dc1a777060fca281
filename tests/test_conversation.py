"""Conversations whose earlier text changes: snapshots, ``on_divergence`` and ``hf_kvret.chat``."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

import hf_kvret
from hf_kvret import ParisKVCache, RetrievalCache, Shelf
from hf_kvret.layer.hybrid import foreign_layers_of
from hf_kvret.models.versions import CHUNKS_COUNT_PAST
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.conformance import ALL_MODELS
from hf_kvret.testing.scenario import prompt, ragged

from .model_types.small import small_model

RUN: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
# Layers with states, convolutions or sliding windows.
HYBRIDS = (
    *("gemma3", "qwen3_next", "lfm2", "falcon_h1", "kimi_linear", "zamba2", "zaya", "gpt_oss"),
    *("bailing_hybrid", "gemma4"),
)
# Those that no zoo has; their words are those of the tokenizer.
SMALL = ("granitemoehybrid", "nemotron_h", "olmo_hybrid", "qwen3_5_text")
# It shows earlier answers without their first six words, which are thought.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}"
    "{{ m.content.split(' ')[6:] | join(' ') }}{% else %}{{ m.content }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> <think>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; the first ones are those of the template."""
    marks = ["<pad>", "<system>", "<user>", "<assistant>", "<think>"]
    words = marks + [f"w{number}" for number in range(len(marks), 128)]
    vocabulary = {word: number for number, word in enumerate(words)}
    words_alone = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words_alone.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words_alone)
    made.chat_template = TEMPLATE
    return made


def _said(turn: int) -> str:
    ids = prompt(1, 150 if turn == 0 else 15, salt=turn)[0]
    return " ".join(f"w{max(5, int(number))}" for number in ids)


def _fresh(model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """What the model answers to a conversation that it reads from its beginning."""
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = inputs["input_ids"]
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **RUN)
    return str(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def _saved(cache: RetrievalCache, model: Any, folder: Path) -> RetrievalCache:
    cache.save_pretrained(folder / "saved")
    return type(cache).from_pretrained(folder / "saved", model.config, model=model)


# Between two turns one of these happens to the cache.
WAYS: dict[str, Callable[..., RetrievalCache]] = {
    "kept": lambda cache, *_: cache,
    "forked": lambda cache, *_: cache.fork(),
    "saved": _saved,
}


@pytest.mark.parametrize(
    ("name", "way", "turns"),
    [
        ("llama", "kept", 3),
        ("gemma3", "kept", 4),
        ("qwen3_next", "forked", 4),
        ("lfm2", "saved", 4),
        *[
            pytest.param(name, way, 8, marks=pytest.mark.slow)
            for name in (*HYBRIDS, *SMALL)
            for way in WAYS
        ],
    ],
)
def test_a_chat_that_strips_thoughts_reads_what_is_new(
    name: str, way: str, turns: int, tokenizer: Any, tmp_path: Path
) -> None:
    is_small = name in SMALL
    model: Any = small_model(name, vocab_size=128) if is_small else ALL_MODELS[name].build()
    talk = hf_kvret.chat(model, tokenizer, cache_config=COVERING_OPTIONS, system="w9 w8 w7")
    for turn in range(turns):
        held = talk.cache.get_seq_length()
        talk.cache = WAYS[way](talk.cache, model, tmp_path / str(turn))
        back = talk.cache.went_back
        messages = [*talk.messages, {"role": "user", "content": _said(turn)}]
        expected = _fresh(model, tokenizer, messages)
        assert talk.send(_said(turn), **RUN) == expected
        assert talk.messages == [*messages, {"role": "assistant", "content": expected}]
        # The answer, and of the prompt what a short pass reads (max_draft=6), are read again.
        most = 0 if turn == 0 else len(expected.split()) + 7
        assert talk.cache.went_back - back <= most or not CHUNKS_COUNT_PAST
        assert held == 0 or talk.cache.went_back > back
    snapshots = talk.cache.stats()["snapshots"]
    assert len(snapshots["lengths"]) == (0 if name == "llama" else 4 if CHUNKS_COUNT_PAST else 2)
    assert talk.cache.memory().snapshots == snapshots["nbytes"]


def test_an_interrupt_leaves_the_conversation_as_it_was(tokenizer: Any) -> None:
    class Stops:
        """A streamer that a user stops at the fourth token."""

        count = 0

        def put(self, _: Any) -> None:
            self.count += 1
            if self.count == 4:
                raise KeyboardInterrupt

        def end(self) -> None:
            """Nothing."""

    model: Any = ALL_MODELS["qwen3_next"].build()
    talk = hf_kvret.chat(model, tokenizer, "flat", cache_config=COVERING_OPTIONS)
    first = talk.send(_said(0), **RUN)
    before = list(talk.messages)
    with pytest.raises(KeyboardInterrupt):
        talk.send(_said(1), streamer=Stops(), **RUN)
    assert talk.messages == before and first
    expected = _fresh(model, tokenizer, [*before, {"role": "user", "content": _said(2)}])
    assert talk.send(_said(2), **RUN) == expected


def test_an_edit_far_back_reads_what_it_must(tokenizer: Any) -> None:
    model: Any = ALL_MODELS["lfm2"].build()
    options = {**COVERING_OPTIONS, "snapshot_every": 64}
    talk = hf_kvret.chat(model, tokenizer, cache_config=options)
    talk.send(_said(0), **RUN)
    assert talk.cache.snapshots.lengths[:2] == [64, 128]
    # Behind the second snapshot, and before the first.
    for cut, kept in ((140, 128), (40, 0)):
        held = talk.cache.get_seq_length()
        words = _said(0).split()[:cut]
        talk.messages = [{"role": "user", "content": " ".join(words)}]
        expected = _fresh(model, tokenizer, [*talk.messages, {"role": "user", "content": "w77"}])
        back = talk.cache.went_back
        assert talk.send("w77", **RUN) == expected
        assert talk.cache.went_back - back == held - kept


def test_a_batch_goes_back_to_what_all_rows_share() -> None:
    model: Any = ALL_MODELS["gemma3"].build()
    ids, mask = ragged((120, 90))
    cache = ParisKVCache(model.config, on_divergence="crop", **COVERING_OPTIONS)
    model.generate(ids, attention_mask=mask, past_key_values=cache, **RUN)
    other = ids.clone()
    other[1, -3:] = torch.tensor([5, 6, 5])
    answers = [
        model.generate(other, attention_mask=mask, past_key_values=one, **RUN)
        for one in (cache, None)
    ]
    assert torch.equal(*answers)
    assert cache.went_back == 8 + 7
    longer = torch.cat([ids, prompt(2, 20)], dim=1)
    seen = torch.nn.functional.pad(mask, (0, 20), value=1)
    with pytest.raises(ValueError, match="differs from the tokens in past_key_values"):
        model.generate(
            longer, attention_mask=seen, past_key_values=cache.fork(on_divergence="error"), **RUN
        )


def test_a_crop_says_what_is_to_be_read_again(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = ALL_MODELS["falcon_h1"].build()
    cache = ParisKVCache(model.config, **COVERING_OPTIONS)
    ids = prompt(1, 150)
    model.generate(ids, past_key_values=cache, **RUN)
    assert cache.snapshots.lengths == [143, 150]
    assert cache.crop(-4) == 4 and cache.get_seq_length() == 150
    assert "read 4 tokens more again" in caplog.text
    # A reorder goes through snapshots, too.
    cache.batch_repeat_interleave(2)
    assert cache.crop(-2) == 5
    both = model.generate(ids.repeat(2, 1), past_key_values=cache, **RUN)
    assert torch.equal(both[1], model.generate(ids, **RUN)[0])
    cache.snapshots.crop(143)
    with pytest.raises(RuntimeError, match="oldest snapshot has 143 tokens: start with a new"):
        cache.crop(100 - cache.get_seq_length())
    cache.reset()
    assert cache.stats()["snapshots"] == {"lengths": [], "nbytes": 0}


def test_snapshots_are_bounded_and_far_from_each_other() -> None:
    model: Any = ALL_MODELS["qwen3_next"].build()
    hf_kvret.attach(model)
    cache = ParisKVCache(model.config, snapshots=5, **COVERING_OPTIONS)
    largest = 0
    with torch.no_grad():
        for turn in range(40):
            model(prompt(1, 10, salt=turn), past_key_values=cache, logits_to_keep=1)
            largest = max(largest, cache.snapshots.nbytes())
    # The states stay as large in 160 more turns.
    for length in range(410, 2010, 10):
        cache.snapshots.take(length, foreign_layers_of(cache.layers), 5)
        largest = max(largest, cache.snapshots.nbytes())
    lengths = cache.snapshots.lengths
    assert len(lengths) == 5 and lengths[-2:] == [1990, 2000]
    assert max(b - a for a, b in zip([0, *lengths], lengths, strict=False)) < 1200
    assert largest == cache.snapshots.nbytes()
    assert cache.fork(snapshots=2).snapshots.lengths == lengths[-2:]
    none = ParisKVCache(model.config, snapshots=0, **COVERING_OPTIONS)
    model.generate(prompt(1, 100), past_key_values=none, **RUN)
    assert not none.snapshots.lengths


def test_a_shelf_gives_the_part_of_a_hybrid_that_a_prompt_shares(tmp_path: Path) -> None:
    model: Any = ALL_MODELS["qwen3_next"].build()
    options = {**COVERING_OPTIONS, "shelf": str(tmp_path), "shelf_step": 1, "snapshot_every": 64}
    ids = prompt(1, 300)
    other = torch.cat([ids[:, :200], prompt(1, 30, salt=2)], dim=1)
    for asked, found in ((ids, 0), (other, 192), (ids, 293)):
        result = model.generate(
            asked,
            cache_implementation="paris",
            cache_config=options,
            return_dict_in_generate=True,
            **RUN,
        )
        assert torch.equal(result.sequences, model.generate(asked, **RUN))
        assert result.past_key_values.stats()["from_shelf"] == found
    assert {entry.points for entry in Shelf(tmp_path).entries()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_attentions": True}, "never forms the attention matrix"),
        ({"cache_config": {"top_k": 7}}, "nothing would read it"),
        ({"max_length": 20}, "Input length of input_ids is 40"),
        ({"num_beams": 3}, "a batch of 1, the new tokens are a batch of 3"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_a_call_that_is_refused_cuts_nothing(name: str, options: Any, words: str) -> None:
    # The second prepares by what it holds; transformers finds too late that a text is too long.
    model: Any = ALL_MODELS["llama" if "max_length" in options else name].build()
    cache = ParisKVCache(model.config, on_divergence="crop", **COVERING_OPTIONS)
    model.generate(prompt(1, 60), past_key_values=cache, **RUN)
    held = cache.input_ids
    # transformers' own attention has no matrix, either.
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=words):
        run = RUN if "max_length" not in options else {"do_sample": False}
        model.generate(prompt(1, 40), past_key_values=cache, **run, **options)
    assert torch.equal(cache.input_ids, held) and cache.went_back == 0


def test_a_second_thread_leaves_the_call_of_the_first_alone(tokenizer: Any, model: Any) -> None:
    talk = hf_kvret.chat(model, tokenizer, cache_config=COVERING_OPTIONS)
    faults: list[BaseException | None] = []

    def disturb(*_: Any) -> None:
        if not faults:
            with ThreadPoolExecutor(1) as pool:
                faults.append(pool.submit(talk.send, "w9").exception())

    hook = model.model.layers[0].mlp.register_forward_pre_hook(disturb)
    answer = talk.send(_said(0), **RUN)
    hook.remove()
    assert "another thread waits" in str(faults[0])
    assert answer == _fresh(model, tokenizer, talk.messages[:1])


def test_tokens_of_unknown_ids_go_with_a_difference_behind_them() -> None:
    model: Any = ALL_MODELS["gemma3"].build()
    cache = ParisKVCache(model.config, on_divergence="crop", **COVERING_OPTIONS)
    embeddings = model.get_input_embeddings()(prompt(1, 80))
    model.generate(inputs_embeds=embeddings, past_key_values=cache, **RUN)
    other = prompt(1, 120, salt=5)
    answer = model.generate(other, past_key_values=cache, **RUN)
    assert torch.equal(answer, model.generate(other, **RUN))


def test_a_generation_config_without_a_length_keeps_the_usual_one(
    tokenizer: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default length of transformers is 20 tokens, of prompt and answer."""
    calls: list[Any] = []
    monkeypatch.setattr(model, "generate", lambda ids, **call: calls.append(call) or ids)
    talk = hf_kvret.chat(model, tokenizer)
    for own, options, most in (
        (GenerationConfig(do_sample=True), {}, 512),
        (GenerationConfig(max_new_tokens=3), {}, None),
        (GenerationConfig(max_length=900), {}, None),
        (GenerationConfig(), {"max_new_tokens": 5}, 5),
        (GenerationConfig(), {"max_length": 900}, None),
        (None, {"max_length": 900}, None),
    ):
        talk.send("w9", **options, **({"generation_config": own} if own else {}))
        assert calls[-1].get("max_new_tokens") == most
        assert calls[-1]["past_key_values"] is talk.cache


def test_bad_chats_are_refused(tokenizer: Any, model: Any) -> None:
    with pytest.raises(ValueError, match="'pariss': choose one of"):
        hf_kvret.chat(model, tokenizer, "pariss")
    talk = hf_kvret.chat(model, tokenizer)
    beams = GenerationConfig(num_beams=3)
    for options in ({"num_beams": 2}, {"generation_config": beams}):
        with pytest.raises(ValueError, match=r"num_beams: .* ask for one answer"):
            talk.send("w9", **options)
    with pytest.raises(ValueError, match="has a cache of its own"):
        talk.send("w9", past_key_values=talk.cache)
    with pytest.raises(ValueError, match="snapshots=1 must be at least 2"):
        hf_kvret.chat(model, tokenizer, cache_config={"snapshots": 1})
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="refuses these messages: no system role"):
        talk.send("w9")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        hf_kvret.chat(model, tokenizer)
