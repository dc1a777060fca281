"""``hf-kvret serve``: an OpenAI client against transformers' server on 127.0.0.1."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hf_kvret import RetrievalCache
from hf_kvret.lab.serve.command import run_serve
from hf_kvret.shelf import Shelf
from hf_kvret.testing import MODELS

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from hf_kvret.lab.serve.bodies import Client, Settings  # noqa: E402
from hf_kvret.lab.serve.requests import ServedCache, answering_with  # noqa: E402

SMALL = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 16, "top_k": 16}
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
TEMPLATE = (
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no such talk') }}{% endif %}"
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
    model.config.max_position_embeddings = 3000
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Served:
    """A client of a running server."""

    def __init__(self, port: int, model: Path) -> None:
        self.model, self.port = str(model), port
        self.url = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def ask(self, text: Any = TEXT, **more: Any) -> str:
        """The answer to a text, or to messages."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        answer = self.client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=12, **more
        )
        return answer.choices[0].message.content

    def post(self, path: str, body: Any, kind: str = "application/json") -> tuple[int, str]:
        """Status and text of the answer to any body, which is JSON unless it is bytes."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": kind})
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
        one = Served(port, folder)
        for _ in range(200):
            try:
                one.client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(0.05)
        yield one
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
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.responses.create(**call, stream=stream)
    assert "'store', which is the server's" in caught.value.response.text


def test_four_at_once_and_a_second_turn(served: Served, folder: Path) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = served.ask(f"{TEXT}{number}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: _full(folder, f"{TEXT}{number}") for number in range(4)}
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": served.ask()},
        {"role": "user", "content": "And then?"},
    ]
    assert served.ask(messages) == _full(folder, messages)


def test_what_requests_have_in_common_is_read_once(
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
    served.ask(text + "Where?")
    # A prompt is put from 2,048 tokens on.
    assert lengths[0] < 300 and lengths[1] > 2000
    assert max(entry.tokens for entry in shelf.entries()) > 2048


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[RetrievalCache]:
    """Every cache of ours that is made while a test runs."""
    caches: list[RetrievalCache] = []
    init = RetrievalCache.__init__

    def noted(self: RetrievalCache, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        caches.append(self)

    monkeypatch.setattr(RetrievalCache, "__init__", noted)
    return caches


@pytest.mark.parametrize(
    ("config", "name", "top_k"),
    [
        ({}, "paris", 1.0),
        ({"cache_config": {"top_k": 3}}, "paris", 3),
        ({"cache_implementation": "paris"}, "paris", 1.0),
        ({"cache_implementation": "flat", "cache_config": {"top_k": 1.0}}, "flat", 1.0),
    ],
)
def test_a_request_may_set_a_budget_and_name_a_cache(
    config: dict[str, Any],
    name: str,
    top_k: float,
    served: Served,
    folder: Path,
    made: list[RetrievalCache],
) -> None:
    answer = served.with_config(**config)
    assert made and {(cache.name, cache.options.top_k) for cache in made} == {(name, top_k)}
    assert {cache.options.prefill_chunk for cache in made} == {512}, "the server's, for all"
    if top_k == 1.0:
        assert answer == _full(folder, TEXT)


def test_full_attention_may_be_asked_for(
    served: Served, folder: Path, made: list[RetrievalCache]
) -> None:
    assert served.with_config(cache_implementation="dynamic") == _full(folder, TEXT)
    assert not made


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cache_config": {"top_q": 16}}, "which is the server's: a request may set top_k"),
        ({"cache_config": {"store": "disk"}}, "'store', which is the server's"),
        ({"cache_config": {"disk": "/etc"}}, "'disk', which is the server's"),
        ({"cache_config": {"shelf": "/etc"}}, "'shelf', which is the server's"),
        ({"cache_config": {"artifact": "evil/artifact"}}, "'artifact', which is the server's"),
        ({"cache_config": {"track_recall": True}}, "'track_recall', which is the server's"),
        ({"cache_config": {"top_k": 0}}, "top_k=0: a count must be at least 1"),
        ({"cache_config": [1]}, "should be a valid dictionary"),
        ({"cache_config": {"top_k": {"top_k": 3}}}, "top_k must be an int"),
        ({"cache_implementation": "nonsense"}, "Choose one of"),
        ({"cache_implementation": "a2ats"}, "a request may name flat"),
        ({"cache_implementation": "static"}, "a request may name flat"),
        ({"cache_implementation": "dynamic", "cache_config": {"top_k": 3}}, "may name flat"),
        ({"use_mtp": True}, "'use_mtp' is the server's; it may set max_new_tokens"),
        ({"forced_eos_token_id": 10**6}, "'forced_eos_token_id' is the server's"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": "much"}, "top_p is 'much'"),
    ],
)
def test_a_mistake_is_answered_with_400_and_the_way_out(
    config: dict[str, Any], message: str, served: Served
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.with_config(**config)
    assert message in caught.value.response.text
    # The server goes on.
    assert served.ask("Hi")


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 3},
    RESPONSES: {"input": HI, "max_output_tokens": 3},
}
DEEP = b"[" * 100_000
# Fields that every route has, with what they can't be, and what an answer says of that.
FIELDS: dict[str, tuple[Any, str]] = {
    "stream": ("yes", "stream is 'yes'"),
    "generation_config": ({"max_new_tokens": 3}, "generation_config is {"),
    "temperature": ("warm", "temperature is 'warm'"),
    "top_p": (3, "top_p is 3"),
    "model": (5, "model is 5"),
}


def _with(route: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return route, {**GOOD[route], **fields}


def _said(role: str, content: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        *((*_with(route, **{k: x}), m) for route in GOOD for k, (x, m) in FIELDS.items()),
        *((route, {"max_tokens": 3}, "is missing") for route in GOOD),
        *((route, b"", "no JSON") for route in GOOD),
        *((route, b'{"seed": 1e999}', "Out of range float") for route in GOOD),
        *((route, b'["\\ud800"]', "surrogates not allowed") for route in GOOD),
        *((route, DEEP, "nested too deep") for route in GOOD),
        *(
            (*_with(route, generation_config=text), m)
            for route in GOOD
            for text, m in (
                ("{", "no JSON"),
                ("[1]", "valid dictionary"),
                (DEEP.decode(), "nested too deep"),
                ('{"max_new_tokens": NaN}', "Out of range float"),
            )
        ),
        (*_with(CHAT, messages=None), "messages is missing"),
        (*_with(CHAT, messages="Hi"), "messages is 'Hi'"),
        (*_with(CHAT, messages=[]), "messages is []"),
        (*_with(CHAT, messages=[{"content": "Hi"}]), "messages.0.role"),
        (*_with(CHAT, messages=_said("user", 5)), "messages.0.content is 5"),
        (*_with(CHAT, messages=_said("user", [{"text": "Hi"}])), "it lacks 'type'"),
        (*_with(CHAT, messages=_said("user", "refuse")), "no such talk"),
        (*_with(CHAT, messages=[{"role": "tool", "tool_calls": [{"x": 1}]}]), "it lacks 'arg"),
        (*_with(CHAT, max_tokens="many"), "max_tokens is 'many'"),
        (*_with(CHAT, max_tokens=0), "max_tokens is 0"),
        (*_with(CHAT, stop=5), "stop is 5"),
        (*_with(CHAT, n=2), "n is 2"),
        (*_with(CHAT, seed=1 << 64), "seed is 18446744073709551616"),
        (*_with(CHAT, logit_bias={"x": 1}), "logit_bias.x"),
        (*_with(CHAT, logit_bias={"500": 1}, stream=True), "500 is beyond the 128 tokens"),
        (*_with(CHAT, tools=5), "not iterable"),
        (*_with(CHAT, chat_template_kwargs={"max_length": 10**9}), "'max_length' is the server's"),
        (*_with(COMPLETIONS, prompt=["Hi"]), "prompt is ['Hi']"),
        (*_with(COMPLETIONS, prompt=""), "the prompt has 0 tokens"),
        (*_with(COMPLETIONS, best_of=3), "best_of is 3"),
        (*_with(COMPLETIONS, suffix=3), "suffix is 3"),
        (*_with(RESPONSES, input=5), "input is 5"),
        (*_with(RESPONSES, input=[*HI, {"type": "function_call"}]), "call_id"),
        (*_with(RESPONSES, input=_said("user", 5)), "input.0.content is 5"),
        (*_with(RESPONSES, max_output_tokens=1.5), "max_output_tokens is 1.5"),
        (*_with(RESPONSES, parallel_tool_calls=None), "parallel_tool_calls is None"),
        ("/load_model", {"model": 5}, "model is 5"),
        ("/v1/systemone", {"model": "m"}, "this server answers /v1/chat/completions"),
        ("/v1/audio/transcriptions", b"", "this server answers /v1/chat/completions"),
    ],
)
def test_a_body_that_is_none_is_answered_with_4xx_and_a_sentence(
    route: str, body: Any, message: str, served: Served
) -> None:
    status, text = served.post(route, body)
    assert 400 <= status < 500 and message in text, text


def test_bodies_at_the_edge_are_answered(served: Served) -> None:
    """Empty values that mean nothing, a type with a charset, and a part of content."""
    for fields in ({"stop": [], "logit_bias": {}, "tools": None}, {"temperature": 1, "n": 1}):
        assert served.post(*_with(CHAT, **fields))[0] == 200
    parts = _said("user", [{"type": "text", "text": "Hi"}])
    for route, body in (_with(CHAT, messages=parts), _with(RESPONSES, input=parts)):
        assert served.post(route, body, "application/json; charset=utf-8")[0] == 200
        assert served.post(route, body, "text/plain")[0] == 415


def test_a_prompt_has_no_more_tokens_than_the_model_or_the_server_takes(folder: Path) -> None:
    with running(folder, max_prompt=100) as one:
        for route, field in ((CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")):
            long: Any = "a" * 101 if route == COMPLETIONS else _said("user", "a" * 101)
            for stream in (False, True):
                status, text = one.post(*_with(route, **{field: long}, stream=stream))
                assert status == 400 and "takes 1 to 100" in text
                assert any(f"the prompt has {n} tokens" in text for n in (101, 119))


def test_an_answer_ends_with_the_models_positions(served: Served, folder: Path) -> None:
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    own = json.dumps({"min_new_tokens": 50, "max_new_tokens": 50})
    for length, expected in ((positions, 1), (positions - 9, 10)):
        body = {"prompt": "a" * length, "generation_config": own}
        answer = json.loads(served.post(COMPLETIONS, body)[1])
        assert answer["usage"]["completion_tokens"] == expected
    assert f"1 to {positions}" in served.post(COMPLETIONS, {"prompt": "a" * (positions + 1)})[1]


@pytest.mark.parametrize("route", list(GOOD))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("passes", [1, 5])
def test_a_client_that_leaves_ends_its_request(
    route: str, stream: bool, passes: int, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the prompt, which has two chunks, and within the answer."""
    counts, check, going = [0], Client.check, Event()

    def counted(self: Client) -> None:
        counts[0] += 1
        if counts[0] == passes:
            going.set()
            assert self.left.wait(30)
        check(self)

    monkeypatch.setattr(Client, "check", counted)
    own = json.dumps({"min_new_tokens": 500, "max_new_tokens": 500})
    _, body = _with(route, stream=stream, generation_config=own)
    body = {k: x for k, x in body.items() if not k.startswith("max")} | {"model": served.model}
    for field in body.keys() & {"messages", "input", "prompt"}:
        body[field] = "a" * 900 if field == "prompt" else _said("user", "a" * 900)
    connection = HTTPConnection("127.0.0.1", served.port)
    connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
    assert going.wait(30)
    connection.sock.close()
    served.ask("Hi")
    assert counts[0] < passes + 20


def test_a_model_without_a_template_is_told_of_and_completes(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=lambda *_: ["chat_template.jinja"])
    with running(Path(bare)) as one:
        assert "the model has no chat template" in caplog.text
        for route, status in ((CHAT, 400), (RESPONSES, 400), (COMPLETIONS, 200)):
            assert one.post(*_with(route))[0] == status


def test_no_other_model_is_loaded(served: Served) -> None:
    other = f"{served.model}-other"
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError):
        served.client.chat.completions.create(model=other, messages=messages)
    for path in ("load_model", "v1/completions"):
        request = Request(
            f"{served.url.removesuffix('/v1')}/{path}",
            json.dumps({"model": other, "prompt": "Hi"}).encode(),
            {"Content-Type": "application/json"},
        )
        with pytest.raises(HTTPError, match="400"):
            urlopen(request)


def test_a_mistake_in_a_stream_is_a_400(served: Served) -> None:
    own = json.dumps({"cache_config": {"top_k": 0}})
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError):
        served.client.chat.completions.create(
            model=served.model,
            messages=messages,
            stream=True,
            extra_body={"generation_config": own},
        )


@pytest.mark.parametrize("requested", [{}, {"max_new_tokens": 5}])
def test_the_models_own_cache_goes_first_where_no_method_is_named(
    requested: dict[str, Any],
) -> None:
    options = {"top_k": 3, "disk": "/etc", "shelf": "/tmp", "artifact": "evil/artifact"}
    defaults = GenerationConfig(cache_implementation="flat", cache_config=options)
    settings = Settings(**requested)
    for first, expected in ((True, ("flat", {"top_k": 3})), (False, ("paris", SMALL))):
        config = GenerationConfig(**requested)
        ServedCache("paris", SMALL, model_first=first).set_cache(config, settings, defaults)
        assert (config.cache_implementation, config.cache_config) == expected


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["--prot", "1"], 2), (["--port", "many"], 2)]
)
def test_transformers_own_options_are_its_own(arguments: list[str], status: int) -> None:
    assert run_serve(["MODEL", *arguments]) == status


@pytest.mark.parametrize(
    ("arguments", "method", "message"),
    [
        ([], None, "name the model"),
        (["--port", "8000"], None, "name the model"),
        (["MODEL", "--continuous-batching"], None, "nothing is retrieved"),
        (["MODEL", "--compile"], None, "transformers' static cache"),
        (["MODEL", "--shelf=s"], None, "put it in front of MODEL"),
        (["MODEL"], "paris:store=disk:disk=/nowhere", "there is no such folder"),
        (["MODEL"], "full", "name a cache of hf-kvret"),
        (["MODEL"], "paris:top_q=3", "no option 'top_q'"),
    ],
)
def test_what_can_not_be_served_is_refused(
    arguments: list[str], method: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_serve(arguments, method)
