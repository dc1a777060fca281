"""``hf-kvret serve``: an OpenAI client against transformers' server on 127.0.0.1."""

import json
import logging
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hf_kvret import RetrievalCache
from hf_kvret.commands.serve import ServeOptions, run_serve
from hf_kvret.contracts.signals import interruptible
from hf_kvret.shelf import Shelf
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

pytest.importorskip("fastapi")

from hf_kvret.commands import serve_requests
from hf_kvret.commands.serve_requests import Client, NewestConversation, ServedCache, answering_with

SMALL = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 16, "top_k": 16}
POSITIONS = 3000
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("served")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The tiny model has 128 tokens: those of ASCII, as far as they go.
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {letter: i + 3 for i, letter in enumerate(letters) if letter in alphabet}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<s>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    model: Any = MODELS["llama"].build()
    model.generation_config.do_sample = False
    model.config.max_position_embeddings = POSITIONS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Served:
    """A client of a running server."""

    def __init__(self, port: int, model: Path) -> None:
        self.model, self.port = str(model), port
        self.url = f"http://127.0.0.1:{port}/v1"
        # Imported here, because it takes seconds.
        openai = pytest.importorskip("openai")
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def ask(self, text: Any = TEXT, **more: Any) -> str:
        """The answer to a text, or to messages."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        answer = self.client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=12, **more
        )
        return answer.choices[0].message.content

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text of the answer to any body, which is JSON unless it is bytes."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def with_config(self, **config: Any) -> str:
        """The answer to a request with a generation config of its own."""
        own = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2, **config}
        return self.ask(extra_body={"generation_config": json.dumps(own)})


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@contextmanager
def running(folder: Path, shelf: Shelf | None = None, **limits: int) -> Iterator[Served]:
    """A server whose requests get a cache that covers everything."""
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cache = ServedCache("paris", {**SMALL, "top_k": 1.0, "prefill_chunk": 512}, shelf)
    with answering_with(cache, **limits):
        place = {"host": "127.0.0.1", "port": port, "device": "cpu", "dtype": "float32"}
        server = Serve(str(folder), non_blocking=True, **place)
        for _ in range(200):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield Served(port, folder)
        server.kill_server()


@pytest.fixture(scope="module")
def served(folder: Path, shelf: Shelf) -> Iterator[Served]:
    with running(folder, shelf) as one:
        yield one


def _full(folder: Path, text: Any) -> str:
    """The answer of transformers alone, to a text or to messages."""
    model: Any = MODELS["llama"].build()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = inputs["input_ids"]
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=2)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_transformers_streamed_and_at_once(
    served: Served, folder: Path
) -> None:
    expected = _full(folder, TEXT)
    assert served.ask() == expected
    messages = [{"role": "user", "content": TEXT}]
    stream = served.client.chat.completions.create(
        model=served.model, messages=messages, max_tokens=12, stream=True
    )
    parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(parts) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_api_goes_the_same_way(
    stream: bool, served: Served, folder: Path, made: list[RetrievalCache]
) -> None:
    call: dict[str, Any] = {"model": served.model, "input": TEXT, "max_output_tokens": 12}
    own = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2}
    call["extra_body"] = {"generation_config": json.dumps(own)}
    answer: Any = served.client.responses.create(**call, stream=stream)
    if stream:
        events = [event for event in answer if event.type == "response.output_text.delta"]
        text = "".join(event.delta for event in events)
    else:
        text = answer.output_text
    assert text == _full(folder, TEXT)
    assert {cache.name for cache in made} == {"paris"}
    own["cache_config"] = {"store": "disk"}
    call["extra_body"] = {"generation_config": json.dumps(own)}
    with pytest.raises(pytest.importorskip("openai").BadRequestError) as caught:
        served.client.responses.create(**call, stream=stream)
    assert "'store', which is the server's" in caught.value.response.text


def test_requests_at_once_and_a_second_turn(
    served: Served, folder: Path, made: list[RetrievalCache]
) -> None:
    texts = [f"{TEXT}{number}" for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(served.ask, texts)]
    assert answers == [_full(folder, text) for text in texts]
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "And then?"},
    ]
    made.clear()
    assert served.ask(messages) == _full(folder, messages)
    # One that checks the options; the cache of an earlier request answers.
    assert len(made) == 1


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_conversation_goes_on_with_the_cache_of_its_last_request(name: str) -> None:
    """Its client leaves out the first six tokens of each answer, which are thought."""
    model: Any = MODELS[name].build()
    newest, ids, cache = NewestConversation(), prompt(1, 120), None
    served = ServedCache("paris", {**SMALL, "top_k": 1.0, "max_draft": 6})
    for turn in range(3):
        config = GenerationConfig(max_new_tokens=9, do_sample=False)
        served.set_cache(config, {})
        given = {"attention_mask": torch.ones_like(ids), "generation_config": config}
        answer = newest.generate(model.generate, input_ids=ids, **given)
        assert torch.equal(answer, model.generate(ids, max_new_tokens=9, do_sample=False))
        assert cache in (None, newest.cache)
        cache = newest.cache
        spoken = answer[:, ids.shape[1] + 6 :]
        ids = torch.cat([ids, spoken, prompt(1, 20, salt=turn + 1)], dim=1)
    assert cache is not None and 0 < cache.went_back <= 2 * (9 + 7)
    config = GenerationConfig(max_new_tokens=2, do_sample=False)
    served.set_cache(config, {"cache_config": {"top_k": 3}})
    newest.generate(model.generate, input_ids=ids, generation_config=config)
    assert newest.cache is not cache


def test_a_common_beginning_of_requests_is_read_once(
    served: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, lengths = TEXT * 14, []
    find = Shelf.find

    def found(*arguments: Any, **options: Any) -> Any:
        cache = find(*arguments, **options)
        lengths.append(0 if cache is None else cache.from_shelf)
        return cache

    monkeypatch.setattr(Shelf, "find", found)
    served.ask(text + "Who?")
    # The cache of a request with other options answers no later one.
    served.with_config(cache_config={"top_k": 3})
    served.ask(text + "Where?")
    # A prompt is put from 2,048 tokens on.
    assert lengths[0] < 300 and lengths[-1] > 2000
    assert max(entry.tokens for entry in shelf.entries()) > 2048


@pytest.fixture
def made(watch: Any) -> list[RetrievalCache]:
    """Every cache of ours that is made while a test runs."""
    return watch(RetrievalCache, "__init__", lambda self, *_, **__: self)


@pytest.mark.parametrize(
    ("config", "top_k"),
    [({"cache_config": {"top_k": 3}}, 3), ({"cache_implementation": "paris"}, 1.0)],
)
def test_a_request_may_set_a_budget(
    config: dict[str, Any], top_k: float, served: Served, made: list[RetrievalCache]
) -> None:
    assert served.with_config(**config)
    assert made and {(cache.name, cache.options.top_k) for cache in made} == {("paris", top_k)}
    assert {cache.options.prefill_chunk for cache in made} == {512}, "the server's, for all"
    made.clear()
    assert served.with_config(cache_implementation="dynamic") and not made


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 3},
    RESPONSES: {"input": HI, "max_output_tokens": 3},
}
# A request's own generation config may have none of these; an answer says the words beside it.
OWN: list[tuple[Any, str]] = [
    ({"cache_config": {"disk": "/etc"}}, "'disk', which is the server's"),
    ({"cache_config": {"shelf": "/etc"}}, "'shelf', which is the server's"),
    ({"cache_config": {"artifact": "evil/artifact"}}, "'artifact', which is the server's"),
    ({"cache_config": {"top_k": 0}}, "top_k=0 must be at least 1"),
    ({"cache_implementation": "nonsense"}, "Choose one of"),
    ({"cache_implementation": "flat"}, "a request may name 'paris', or 'dynamic'"),
    ({"cache_implementation": "dynamic", "cache_config": {"top_k": 3}}, "may name 'paris'"),
    ({"eos_token_id": "x"}, "eos_token_id='x': Input should be a valid integer, or: Input should"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5: Input should be a valid integer"),
    ({"cache_config": []}, "cache_config=[]: Input should be a valid dictionary"),
    ({"use_mtp": True}, "'use_mtp', which is the server's: a request may set"),
    ([1], "no JSON object"),
]
# Bodies of every route: fields, or JSON, and what an answer says of it.
BODIES: list[tuple[Any, str]] = [
    *(({"generation_config": json.dumps(own)}, message) for own, message in OWN),
    ({"generation_config": {"max_new_tokens": 3}}, "no JSON text"),
    ({"model": "other"}, "this server answers with"),
    (b"", "no JSON"),
]
MORE: list[tuple[str, Any, str]] = [
    (COMPLETIONS, {"prompt": ""}, "the prompt has 0 tokens"),
    (CHAT, {"messages": None}, "messages is missing"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "it lacks 'type'"),
    (CHAT, {"max_tokens": "many"}, "many"),
    (CHAT, {"logit_bias": {"50": "much"}}, "could not convert"),
    (CHAT, {"tools": 5}, "not iterable"),
    (CHAT, {"n": 2}, "n is not served here"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format is not served here"),
    (COMPLETIONS, {"logprobs": 1}, "logprobs is not served here"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id is not served here"),
    (RESPONSES, {"input": 5}, "must be a string or list"),
    ("/load_model", {"model": "other"}, "this server answers with"),
    ("/v1/audio/transcriptions", b"", "this server answers /v1/chat/completions"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_answered_with_4xx_and_a_sentence(stream: bool, served: Served) -> None:
    for route, body, message in (*((route, *one) for route in GOOD for one in BODIES), *MORE):
        if not isinstance(body, bytes):
            body = GOOD.get(route, {}) | {"stream": stream} | body
        status, text = served.post(route, body)
        assert 400 <= status < 500 and message in text, (route, body, text)
    usual = {"n": 1, "logprobs": False, "tool_choice": "auto", "stream": stream}
    assert served.post(CHAT, GOOD[CHAT] | usual)[0] == 200, "the server goes on"


def test_a_bias_of_logits_is_a_whole_number(served: Served) -> None:
    """As OpenAI's API has it; transformers asks for one with a point."""
    status, text = served.post(CHAT, GOOD[CHAT] | {"logit_bias": {"70": 100}})
    [choice] = json.loads(text)["choices"]
    assert status == 200 and len(set(choice["message"]["content"])) == 1


def _long(route: str, length: int) -> dict[str, Any]:
    """A body whose prompt has ``length`` tokens, beside those of a template."""
    text: Any = "a" * length
    if route != COMPLETIONS:
        text = [{"role": "user", "content": text}]
    return {{CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[route]: text}


def test_prompts_and_answers_end_with_the_models_positions(served: Served) -> None:
    for route, more in ((CHAT, 18), (COMPLETIONS, 0), (RESPONSES, 18)):
        for stream in (False, True):
            status, text = served.post(route, _long(route, POSITIONS + 1) | {"stream": stream})
            assert status == 400
            assert f"{POSITIONS + 1 + more} tokens, and this server takes 1 to {POSITIONS}" in text
    own = json.dumps({"min_new_tokens": 30, "max_new_tokens": 30})
    for length, expected in ((POSITIONS, 1), (POSITIONS - 9, 10)):
        body = {**_long(COMPLETIONS, length), "generation_config": own}
        answer = json.loads(served.post(COMPLETIONS, body)[1])
        assert answer["usage"]["completion_tokens"] == expected


@pytest.mark.factor("route", list(GOOD))
@pytest.mark.factor("stream", [False, True])
@pytest.mark.factor("passes", [1, 5])
def test_a_client_that_leaves_ends_its_request(
    route: str, stream: bool, passes: int, served: Served, monkeypatch: Any, caplog: Any
) -> None:
    """Within the prompt, which has two chunks, and the answer. It is no error of the server."""
    count, going = 0, Event()

    class Leaving(Event):
        def is_set(self) -> bool:
            nonlocal count
            count += 1
            if count == passes:
                going.set()
                assert self.wait(30)
            return super().is_set()

    monkeypatch.setattr(serve_requests, "Client", lambda: Client(Leaving()))
    own = json.dumps({"min_new_tokens": 500, "max_new_tokens": 500})
    body = {**_long(route, 900), "stream": stream, "generation_config": own}
    connection = HTTPConnection("127.0.0.1", served.port)
    connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
    assert going.wait(30)
    connection.sock.close()
    served.ask("Hi")
    assert count < passes + 20
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_model_without_a_template_completes_and_logs_what_it_drops(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=lambda *_: ["chat_template.jinja"])
    other = {"cache_implementation": "static", "num_beams": 2, "output_attentions": True}
    (bare / "generation_config.json").write_text(json.dumps({**other, "use_cache": False}))
    with running(bare, max_prompt=100) as one:
        assert all(name in caplog.text for name in (*other, "use_cache"))
        assert one.post(COMPLETIONS, GOOD[COMPLETIONS])[0] == 200
        assert "101 tokens, and" in one.post(COMPLETIONS, _long(COMPLETIONS, 101))[1]


@pytest.mark.parametrize(
    ("arguments", "method", "message"),
    [
        ([], "paris", "name the model"),
        (["--port", "8000"], "paris", "name the model"),
        (["MODEL", "--continuous-batching"], "paris", "nothing is retrieved"),
        (["MODEL", "--method", "flat"], "paris", "put it in front of MODEL"),
        (["MODEL"], "paris:store=disk:disk=/nowhere", "there is no such folder"),
        (["MODEL"], "full", "name a cache of hf-kvret"),
        (["MODEL"], "paris:top_q=3", "no option 'top_q'"),
    ],
)
def test_serve_refuses_bad_options(arguments: list[str], method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_serve(arguments, ServeOptions(method))


def test_a_signal_that_ends_the_server_ends_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any, **__: Any) -> None:
        """As typer does: whatever the signal, its status is that of Ctrl-C."""
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    monkeypatch.setattr("typer.Typer.__call__", end)
    with interruptible(signal.SIGTERM), pytest.raises(KeyboardInterrupt) as caught:
        run_serve([str(folder)], ServeOptions("paris"))
    assert caught.value.args == (signal.SIGTERM,)
