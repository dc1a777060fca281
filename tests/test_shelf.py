"""A shelf: what was read once is found again, and nothing that doesn't fit."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import ParisKVCache, Shelf, ShelfEntry
from hf_kvret.saved.description import verify_cache
from hf_kvret.saved.identity import identity_of
from hf_kvret.shelf import shelf as shelf_checks
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
IDS = prompt(1, 128)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")


def _read(
    model: PreTrainedModel, ids: torch.Tensor, method: str = "paris", **options: Any
) -> hf_kvret.RetrievalCache:
    """A cache that has read ``ids`` and holds an answer behind them."""
    cls = hf_kvret.registered_methods()[method]
    cache = cls(model.config, **{**COVERING_OPTIONS, **options})
    model.generate(ids, past_key_values=cache, **RUN)
    return cache


def _pass(model: PreTrainedModel, ids: torch.Tensor, method: str, **options: Any) -> Any:
    """A cache that has read ``ids`` alone."""
    cls = hf_kvret.registered_methods()[method]
    cache = cls(model.config, **{**COVERING_OPTIONS, **options})
    hf_kvret.attach(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def _put(shelf: Shelf, model: PreTrainedModel, ids: torch.Tensor, title: str = "") -> ShelfEntry:
    return shelf.put(_read(model, ids), ids, model, title)


def _find(
    shelf: Shelf, model: PreTrainedModel, ids: torch.Tensor, method: str = "paris", **options: Any
) -> Any:
    return shelf.find(ids, model, method, **{**COVERING_OPTIONS, **options})


def _with_more(ids: torch.Tensor, length: int = 20, salt: int = 1) -> torch.Tensor:
    return torch.cat([ids, prompt(1, length, salt=salt)], dim=1)


@pytest.mark.parametrize(
    ("method", "store"), [("paris", "cpu"), ("ctkvr", "device"), ("h2o", "cpu")]
)
def test_a_prompt_goes_on_from_what_is_on_the_shelf(
    method: str, store: str, llama: PreTrainedModel, shelf: Shelf
) -> None:
    document = prompt(1, 200)
    cache = _pass(llama, document, method)
    entry = shelf.put(cache, document, llama)
    assert (entry.tokens, entry.method) == (200, method) and entry.nbytes > 200 * 64 * 4
    question = _with_more(document)
    found = _find(shelf, llama, question, method, store=store)
    assert found.get_seq_length() == found.from_shelf == found.stats()["from_shelf"] == 200
    assert found.options.store == store
    answer = llama.generate(question, past_key_values=found, **RUN)
    # As the cache that read it goes on.
    assert torch.equal(answer, llama.generate(question, past_key_values=cache, **RUN))


def test_a_part_of_an_entry_is_found_and_an_answer_is_not_put(
    llama: PreTrainedModel, shelf: Shelf
) -> None:
    ids = prompt(1, 300)
    cache = _read(llama, ids)
    assert cache.get_seq_length() == 303
    entry = shelf.put(cache, ids, llama)
    assert entry.tokens == 300 and entry.can_crop and cache.get_seq_length() == 303
    other = torch.cat([ids[:, :250], prompt(1, 30, salt=2)], dim=1)
    # Whole blocks of 64: three of the four that begin within 250 tokens end there. Of the same
    # prompt a token is left to be read.
    for asked, known in ((other, 192), (ids, 299)):
        found = _find(shelf, llama, asked)
        assert found.from_shelf == found.get_seq_length() == known
        answer = llama.generate(asked, past_key_values=found, **RUN)
        assert torch.equal(answer, llama.generate(asked, **RUN))
    # A crop takes away what came from the shelf.
    found.crop(100 - found.get_seq_length())
    llama.generate(_with_more(ids[:, :100]), past_key_values=found, **RUN)
    assert found.stats()["from_shelf"] == found.fork().stats()["from_shelf"] == 100
    assert _find(shelf, llama, prompt(1, 300, salt=3)) is None
    assert _find(shelf, llama, ids[:, :40]) is None


@pytest.mark.parametrize(("name", "method"), [("gemma3", "flat"), ("qwen3_next", "paris")])
def test_what_can_not_go_back_is_taken_whole_or_not(name: str, method: str, shelf: Shelf) -> None:
    model, ids = MODELS[name].build(), prompt(1, 130)
    assert not shelf.put(_pass(model, ids, method), ids, model).can_crop
    assert _find(shelf, model, ids, method) is None
    more = _with_more(ids)
    found = _find(shelf, model, more, method)
    assert found.from_shelf == 130
    answer = model.generate(more, past_key_values=found, **RUN)
    assert torch.equal(answer, model.generate(more, **RUN))
    assert shelf.put(found, ids, model).tokens == 130
    found.snapshots.reset()
    with pytest.raises(RuntimeError, match="put it before anything is generated"):
        shelf.put(found, ids, model)


def test_a_request_finds_only_what_it_could_have_read_itself(
    llama: PreTrainedModel, shelf: Shelf
) -> None:
    _put(shelf, llama, IDS)
    retrieve = {"above": 0, "floor": 0, "exact": 16}
    more = _with_more(IDS)
    for options in ({"top_k": 16}, {"store": "host"}, {"flush": 8}, {"max_draft": 9}):
        found = _find(shelf, llama, more, **options)
        assert options.items() <= vars(found.options).items()
    coded: dict[str, Any] = {"store": "higgs", "bits": 16}
    for options in ({"sink": 3}, {"recent": 16}, {"prompt": retrieve}, {"store": "higgs"}, coded):
        assert _find(shelf, llama, more, **options) is None
    assert _find(shelf, llama, more, "flat") is None
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert _find(shelf, llama, more) is None
    assert _find(shelf, MODELS["qwen3"].build(), more) is None
    shelf.put(_read(llama, IDS, prompt=retrieve), IDS, llama)
    assert _find(shelf, llama, more, prompt=retrieve).options.prompt_recipe is not None
    assert _find(shelf, llama, more) is None


def test_what_evicts_is_found_with_its_budget_and_put_without_an_answer(
    llama: PreTrainedModel, shelf: Shelf
) -> None:
    ids = prompt(1, 200)
    cache = _pass(llama, ids, "h2o", top_k=16)
    shelf.put(cache, ids, llama)
    assert _find(shelf, llama, _with_more(ids), "h2o", top_k=16) is not None
    assert _find(shelf, llama, _with_more(ids), "h2o") is None
    with torch.no_grad():
        llama(ids[:, :1], past_key_values=cache)
    with pytest.raises(RuntimeError, match="h2o has weighed earlier tokens by them"):
        shelf.put(cache, ids, llama)


def test_the_least_used_entries_leave_and_beginnings_of_longer_ones(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    shelf, texts = Shelf(tmp_path), [prompt(1, 128, salt=salt) for salt in range(4)]
    first = _put(shelf, llama, texts[0])
    assert _put(shelf, llama, texts[0]).name == first.name and len(shelf.entries()) == 1
    shelf = Shelf(tmp_path, max_size=int(first.nbytes * 2.5))
    _put(shelf, llama, texts[1])
    for name in (entry.name for entry in shelf.entries()):
        os.utime(tmp_path / name / "shelf.json", (1, 1 if name == first.name else 2))
    assert _find(shelf, llama, _with_more(texts[0])) is not None
    _put(shelf, llama, texts[2])
    left = [_find(shelf, llama, _with_more(ids)) is not None for ids in texts]
    assert left == [True, False, True, False]
    _put(shelf, llama, _with_more(texts[0], 30))
    assert [entry.tokens for entry in shelf.entries()] == [158, 128]
    assert first.name not in {entry.name for entry in shelf.entries()}
    with pytest.raises(
        ValueError, match=r"the cache takes .* MB, and the shelf holds at most 0.001 MB"
    ):
        _put(Shelf(tmp_path / "small", max_size=1000), llama, texts[3])
    assert not list((tmp_path / "small").iterdir())
    with pytest.raises(TypeError, match="title=5: pass a text"):
        _put(shelf, llama, texts[0], title=5)  # type: ignore[arg-type]


def test_files_are_their_owners_alone_and_those_of_others_are_left_out(
    llama: PreTrainedModel, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    path = shelf.folder / _put(shelf, llama, IDS).name
    assert shelf.folder.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    for target in (path, path / "shelf.json"):
        target.chmod(target.stat().st_mode | 0o020)
        assert _find(shelf, llama, _with_more(IDS)) is None
        assert "others could have written it" in caplog.messages[-1]
        target.chmod(target.stat().st_mode & ~0o020)
    assert _find(shelf, llama, _with_more(IDS)) is not None


def _swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def _shard(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


FAULTS: dict[str, Callable[[Path, Path], Any]] = {
    "swapped descriptions": lambda path, other: _swap(path / "shelf.json", other / "shelf.json"),
    "no description": lambda path, other: (path / "shelf.json").unlink(),
    "no shard": lambda path, other: _shard(path).unlink(),
    "a bit of a shard": lambda path, other: _flip(_shard(path)),
}


@pytest.fixture(scope="module")
def documents() -> tuple[PreTrainedModel, list[tuple[hf_kvret.RetrievalCache, torch.Tensor]]]:
    """A model, and two caches with the texts that they have read; nobody changes them."""
    model = MODELS["llama"].build()
    return model, [(_read(model, ids), ids) for ids in (prompt(1, 192), prompt(1, 192, salt=2))]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_entry_is_left_out_with_a_warning_and_is_put_again(
    fault: str, documents: Any, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    model, pairs = documents
    names = [shelf.put(*pair, model).name for pair in pairs]
    FAULTS[fault](*(shelf.folder / name for name in names))
    # As in other processes, each of which has to see it by itself.
    other = Shelf(shelf.folder)
    assert shelf.has(pairs[0][1], model, "paris", **COVERING_OPTIONS) is None
    assert _find(other, model, _with_more(pairs[0][1])) is None
    assert "is left out" in caplog.text
    for pair in pairs:
        other.put(*pair, model)
    assert {entry.name for entry in other.entries()} == set(names)
    for _, ids in pairs:
        assert other.has(ids, model, "paris", **COVERING_OPTIONS) is not None
        assert _find(other, model, _with_more(ids)).from_shelf == 192
    written = (shelf.folder / names[0]).stat().st_ino
    other.put(*pairs[0], model)
    assert (shelf.folder / names[0]).stat().st_ino == written, "it is whole, and not put again"


def test_what_has_a_title_stays_and_is_found_by_it(llama: PreTrainedModel, shelf: Shelf) -> None:
    ids = prompt(1, 300)
    cache = _read(llama, ids)
    short = shelf.put(cache, ids[:, :128], llama, title="short")
    shelf.put(cache, ids, llama)
    assert {entry.tokens for entry in shelf.entries()} == {128, 300}
    os.utime(shelf.folder / short.name / "shelf.json", (1, 1))
    assert shelf.load("short", llama).from_shelf == 128
    assert shelf.entries()[0].name == short.name, "it was used just now"
    other = shelf.put(cache, ids[:, :192], llama, title=short.name)
    assert shelf.entry(short.name).tokens == 128, "a name comes before a title"
    shelf.remove(other.name)
    # What is damaged can be removed, too.
    (shelf.folder / short.name / "shelf.json").write_text("{")
    shelf.remove(short.name)
    assert [entry.tokens for entry in shelf.entries()] == [300]
    twins = [shelf.put(cache, ids[:, :length], llama, title="twin") for length in (192, 256)]
    with pytest.raises(ValueError, match=f"2 entries .* give the name of one, {twins[1].name}, "):
        shelf.remove("twin")
    for twin in twins:
        shelf.remove(twin.name)
    for name in ("", "../elsewhere"):
        with pytest.raises(ValueError, match=f"no entry '{name}'"):
            shelf.remove(name)


def test_a_shelf_may_be_a_link_of_ones_own(llama: PreTrainedModel, tmp_path: Path) -> None:
    real = tmp_path / "real"
    (tmp_path / "link").symlink_to(real)
    shelf = Shelf(tmp_path / "link")
    name = _put(shelf, llama, IDS, "title").name
    assert (real / name).is_dir() and (tmp_path / "link").is_symlink()
    assert _find(shelf, llama, _with_more(IDS)) is not None
    assert verify_cache(tmp_path / "link" / name)
    # Links in a shelf are not followed.
    (real / name).rename(tmp_path / "elsewhere")
    (real / name).symlink_to(tmp_path / "elsewhere")
    assert not shelf.entries()
    real.chmod(0o770)
    with pytest.raises(ValueError, match="others may write there"):
        shelf.check_writable()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: give a folder"):
        Shelf(tmp_path / "file")


def test_a_shelf_takes_half_of_what_its_disk_has_for_it(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [10**9]
    usage = lambda path: [path.stat(), SimpleNamespace(free=free[0])][1]  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    shelf = Shelf(tmp_path / "not" / "there")
    assert shelf.max_bytes == 10**9 // 2
    nbytes = _put(shelf, llama, IDS).nbytes
    free[0] -= nbytes
    assert shelf.max_bytes == 10**9 // 2, "what is there counts as free"
    assert Shelf(shelf.folder, max_size=10**6).max_bytes == 10**6
    assert Shelf(shelf.folder, max_size=10**12).max_bytes == free[0] + nbytes


def test_what_is_no_text_of_one_sequence_is_refused(
    llama: PreTrainedModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _read(llama, IDS)
    embedded = ParisKVCache(llama.config, **COVERING_OPTIONS)
    with torch.no_grad():
        embeds = llama.get_input_embeddings()(IDS)
    llama.generate(inputs_embeds=embeds, past_key_values=embedded, **RUN)
    padded = ParisKVCache(llama.config, **COVERING_OPTIONS)
    mask = torch.ones_like(IDS).index_fill(1, torch.arange(9), 0)
    llama.generate(IDS, attention_mask=mask, past_key_values=padded, **RUN)
    qwen = MODELS["qwen3"].build()
    for filled, ids, model, words in (
        (cache, prompt(2, 128), llama, r"input_ids are \[2, 128\]: a shelf holds caches of one s"),
        (cache, prompt(1, 128, salt=5), llama, "the cache has not read these 128 tokens"),
        (cache, prompt(1, 400), llama, "the cache has not read these 400 tokens"),
        (cache, IDS[:, :20], llama, "input_ids has 20 tokens: a shelf holds 64 and more"),
        (cache, IDS, qwen, "qwen3"),
        (ParisKVCache(llama.config), IDS, llama, "whose tokens it saw"),
        (embedded, IDS, llama, "filled with more than text"),
        (padded, IDS, llama, "the cache holds padding"),
        (padded.fork(), IDS, llama, "the cache holds padding"),
    ):
        with pytest.raises(ValueError, match=words):
            shelf.put(filled, ids, model)
    with pytest.raises(ValueError, match="method='pariss': choose among"):
        shelf.find(IDS, llama, "pariss")
    with pytest.raises(ValueError, match="did you mean 'top_k'"):
        shelf.find(IDS, llama, "paris", topk=3)
    with monkeypatch.context() as patch:
        patch.setattr(llama.config, "image_token_id", int(IDS[0, 5]), raising=False)
        with pytest.raises(ValueError, match="filled with more than text"):
            shelf.put(cache, IDS, llama)
    bare = replace(identity_of(llama), weights={})
    monkeypatch.setattr(shelf_checks, "identity_of", lambda model: bare)
    with pytest.raises(ValueError, match="weights can't be read here"):
        shelf.put(cache, IDS, llama)
    assert not shelf.folder.exists() and shelf.entries() == []


def test_two_processes_put_the_same_and_a_killed_one_leaves_nothing(
    llama: PreTrainedModel, shelf: Shelf
) -> None:
    cache, fork = _read(llama, IDS), multiprocessing.get_context("fork")
    names, is_written = fork.SimpleQueue(), fork.Event()

    def put(hangs: bool) -> None:
        # A forked process lacks the threads of a pool that its parent has used.
        torch.set_num_threads(1)
        save = ParisKVCache.save_pretrained

        def saved(self: ParisKVCache, *args: Any, **options: Any) -> None:
            save(self, *args, **options)
            if hangs:
                is_written.set()
                signal.pause()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ParisKVCache, "save_pretrained", saved)
            names.put(shelf.put(cache, IDS, llama).name)

    killed, *others = (
        fork.Process(target=put, args=(hangs,), daemon=True) for hangs in (True, False, False)
    )
    killed.start()
    assert is_written.wait(60) and not shelf.entries()
    for process in others:
        process.start()
    for process in others:
        process.join(60)
        assert process.exitcode == 0
    assert {names.get() for _ in others} == {entry.name for entry in shelf.entries()}
    killed.kill()
    killed.join(60)
    assert _find(shelf, llama, _with_more(IDS)).from_shelf == 128
    # A day later nobody is at work on its folder any more.
    [left] = shelf.folder.glob(".unfinished-*")
    _put(shelf, llama, prompt(1, 128, salt=8))
    assert left.exists()
    os.utime(left, (1, 1))
    _put(shelf, llama, prompt(1, 128, salt=9))
    assert not list(shelf.folder.glob(".unfinished-*")) and len(shelf.entries()) == 3
