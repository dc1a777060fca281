"""What A2ATS's ablation is made of: texts kept apart, the likeness of codebooks, its artifacts."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from a2ats_ablation import FULL_METHOD, MEASUREMENT, SWITCHES
from a2ats_parts import ExactKeysCache, likeness, similarity

from hf_kvret import A2ATSCache
from hf_kvret.calibration.corpus import Corpus
from hf_kvret.calibration.runner import calibrate
from hf_kvret.evaluation.caches import choose_cache
from hf_kvret.evaluation.subject import Subject, load_subject
from hf_kvret.evaluation.texts import read_text, token_ids
from hf_kvret.methods.a2ats.k_means import k_means
from hf_kvret_model_patches.taps import LayerTokens, tap_attention


@pytest.fixture(scope="module")
def subject(tiny_model_dir: Path) -> Subject:
    return load_subject(str(tiny_model_dir))


@pytest.fixture
def other_text(tmp_path: Path) -> Path:
    path = tmp_path / "other.txt"
    path.write_text("\n".join(f"The mill had {n * n} stones in its wall." for n in range(99)))
    return path


def _study(text: Path | None, calibration: Path | None = None, **options: Any) -> Any:
    sizes = {"calibration_tokens": 600, "uuid_tokens": 100, "calibration_length": 150, "seed": 7}
    learned = {"codewords": 12, "rope_window": 100, "rounds": 3, "new_tokens": 10}
    return MEASUREMENT(text=text, calibration_text=calibration, **{**sizes, **learned, **options})


def test_contexts_of_one_file_begin_where_the_calibration_ends(
    subject: Subject, tiny_text: Path
) -> None:
    texts, ids = _study(tiny_text, windows=2), token_ids(subject.tokenizer, read_text(tiny_text))
    corpus = texts.corpus(subject)
    # One sequence of UUIDs, four of the text, the last of them held out.
    assert [len(one) for one in corpus.sequences] == [100, 150, 150, 150, 150]
    assert corpus.held_out == 1
    assert torch.equal(torch.cat(corpus.sequences[1:]), ids[:600])
    first, second = texts.contexts(subject, "switches", 190)
    # Contexts have a BOS in front of the text that is left.
    assert torch.equal(torch.cat([first, second]), torch.cat([ids[:1], ids[600:999]]))


def test_contexts_of_another_file_begin_at_its_start(
    subject: Subject, tiny_text: Path, other_text: Path
) -> None:
    texts, ids = _study(tiny_text, other_text), token_ids(subject.tokenizer, read_text(tiny_text))
    learned = token_ids(subject.tokenizer, read_text(other_text))
    assert torch.equal(torch.cat(texts.corpus(subject).sequences[1:]), learned[:600])
    assert torch.equal(texts.contexts(subject, "switches", 190)[0], ids[:200])


def test_the_calibrations_text_is_no_text_to_measure_on(
    subject: Subject, other_text: Path, tmp_path: Path
) -> None:
    twin = tmp_path / "twin.txt"
    # The same under another name, and the same with another first line.
    for first in ("", "A tale of a mill.\n"):
        twin.write_text(first + read_text(other_text))
        texts = _study(twin, other_text)
        with pytest.raises(ValueError, match=r"(\d\d|100)% of a context stands in --calibration-t"):
            texts.contexts(subject, "switches", 190)
    with pytest.raises(ValueError, match="give --text too"):
        _study(None, other_text)


def test_inputs_are_apart_and_begin_with_bos(subject: Subject, tiny_text: Path) -> None:
    ids = token_ids(subject.tokenizer, read_text(tiny_text))[599:].clone()
    ids[0] = subject.tokenizer.bos_token_id
    inputs = _study(tiny_text).pieces(subject, count=3, size=50)
    assert list(inputs) == ["text 1", "text 2", "text 3", "UUIDs"]
    assert all(len(one) == 50 and one[0] == ids[0] for one in inputs.values())
    for number in range(3):
        start = number * (len(ids) // 3)
        assert torch.equal(inputs[f"text {number + 1}"][1:], ids[start + 1 : start + 50])


def test_documents_of_needles_differ_from_the_calibrations() -> None:
    needle, texts = load_subject("needle"), _study(None, windows=3)
    learned = texts.corpus(needle).sequences
    shown = [*texts.contexts(needle, "switches", 140)]
    shown += texts.pieces(needle, count=3, size=150).values()
    known = [tuple(one.tolist()) for one in (*learned, *shown)]
    assert len(learned) == 4 and len(set(known)) == 10
    # Not even shifted: runs of noise and needles are drawn anew.
    runs = {one[start : start + 12] for one in known[:4] for start in range(138)}
    again = [one[start : start + 12] for one in known[4:] for start in range(138)]
    assert not runs.intersection(again)


def test_similarity_is_the_papers() -> None:
    """Equation 7, by loops, for codebooks of different sizes too."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(2, 5, 3, generator=generator)
    second = torch.randn(2, 7, 3, generator=generator)
    found = similarity(first, second)
    assert found.shape == (2,) and found.dtype == torch.float32
    for head in range(2):
        halves = []
        for one, other in ((first[head], second[head]), (second[head], first[head])):
            best = [
                max(float(a @ b / a.norm() / b.norm()) for b in other.double())
                for a in one.double()
            ]
            halves.append(sum(best) / len(best))
        assert float(found[head]) == pytest.approx(sum(halves) / 2, abs=1e-6)


def test_similarity_knows_neither_order_nor_length() -> None:
    words = torch.eye(4)[None]
    assert float(similarity(words, 3 * words.flip(1))) == pytest.approx(1)
    # Two words of four are at a right angle to all others.
    assert float(similarity(words[:, :2], words[:, 2:])) == pytest.approx(0)
    assert float(similarity(words[:, :1], -words[:, :1])) == pytest.approx(-1)


def test_codebooks_before_rope_do_not_see_the_order_of_tokens(subject: Subject) -> None:
    """The keys of the first layer are those of its tokens, wherever they stand."""
    ids = torch.arange(3, 43)
    inputs = {"one": ids, "other": ids.flip(0)}
    found = {
        rotated: likeness(subject, inputs, codewords=len(ids), rotated=rotated, rounds=2, seed=0)
        for rotated in (False, True)
    }
    for layers in found.values():
        assert [one["layer"] for one in layers] == [0, 1]
        for one in layers:
            (same, pair), (again, itself) = one["alike"]
            assert same == pytest.approx(1, abs=1e-5) and itself == pytest.approx(1, abs=1e-5)
            assert pair == pytest.approx(again, abs=1e-6)
    assert found[False][0]["alike"][0][1] == pytest.approx(1, abs=1e-5)
    assert found[True][0]["alike"][0][1] < 0.99
    # Later layers have read the tokens before.
    assert found[False][1]["alike"][0][1] < 0.999


def test_likeness_is_that_of_codebooks_of_the_tapped_keys(subject: Subject) -> None:
    inputs = {"one": torch.arange(3, 60), "other": torch.arange(80, 137)}
    books = {}
    for name, ids in inputs.items():

        def take(layer: int, tokens: LayerTokens, name: str = name) -> None:
            books[name, layer] = k_means(tokens.key[0].clone(), 9, rounds=4, seed=3)[0]

        with torch.no_grad(), tap_attention(subject.model, take):
            subject.model(ids[None], use_cache=False)
    layers = likeness(subject, inputs, codewords=9, rotated=True, rounds=4, seed=3)
    for layer, found in enumerate(layers):
        expected = similarity(books["one", layer], books["other", layer]).mean()
        assert found["alike"][0][1] == pytest.approx(float(expected), abs=1e-6)


def test_plain_rows_are_what_query_aware_codebooks_are_compared_with(
    subject: Subject, tiny_text: Path, tmp_path: Path
) -> None:
    """So four artifacts hold the whole figure; and one with a comparison in it fits too."""
    study = _study(tiny_text, artifacts=tmp_path / "four")
    calibration = replace(study.calibration(FULL_METHOD), compare=True)
    folder = study.path(FULL_METHOD.replace(", ", "-"))
    corpus = study.corpus(subject)
    both = calibrate(subject.model, corpus, calibration, folder, progress=False)
    assert "plain_score_error" in study.artifact(FULL_METHOD, subject)[1].quality[0]
    alone = _study(tiny_text, artifacts=tmp_path / "other")
    aware = alone.artifact("windowed, query-aware", subject)[1].quality
    plain = alone.artifact("windowed, plain", subject)[1].quality
    for row, one, other in zip(both.quality, aware, plain, strict=True):
        assert row["score_error"] == one["score_error"]
        assert row["plain_score_error"] == other["score_error"] != one["score_error"]


def test_artifacts_of_other_weights_are_refused(
    subject: Subject, tiny_model_dir: Path, tiny_text: Path, tmp_path: Path
) -> None:
    name = list(SWITCHES)[1]
    _study(tiny_text, artifacts=tmp_path).artifact(name, subject)
    other = load_subject(str(tiny_model_dir))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.5)
    with pytest.raises(ValueError, match="made from other weights"):
        _study(tiny_text, artifacts=tmp_path).artifact(name, other)


def test_without_a_folder_artifacts_are_gone_in_the_end(subject: Subject, tiny_text: Path) -> None:
    study = _study(tiny_text)
    study.artifact("rotated, plain", subject)
    folder = study.path("rotated-plain")
    assert folder.is_dir()
    del study
    gc.collect()
    assert not folder.exists()


def test_exact_keys_select_what_codewords_do_where_every_token_has_its_own(
    subject: Subject, tmp_path: Path
) -> None:
    """And after a fork, a crop and another pass."""
    ids = torch.arange(3, 63)
    # No token of the text comes twice, and each layer learns a codeword for each of them.
    options = replace(
        _study(None, codewords=60, rounds=0).calibration(FULL_METHOD), codeword_dtype="float32"
    )
    corpus = Corpus([ids], held_out=0, description={})
    calibrate(subject.model, corpus, options, tmp_path, progress=False)
    text = f"a2ats:artifact={tmp_path}:top_k=7:dense_below=0:recent=8:flush=8:track_recall=true"
    coded = choose_cache(text)
    recalls, choices = [], []
    for kind in (A2ATSCache, ExactKeysCache):
        cache = kind(config=subject.model.config, options=coded.options)
        with torch.inference_mode():
            subject.model(ids[None, :50], past_key_values=cache)
            twin = cache.fork()
            subject.model(ids[None, 50:52], past_key_values=twin)
            twin.crop(-1)
            logits = subject.model(ids[None, 51:], past_key_values=twin).logits
        choices.append(logits)
        recalls.append([one for x in twin.retrieval_layers for one in x.counters.recalls])
    assert isinstance(twin, ExactKeysCache)
    # Sums are of ids in another order.
    for one, other in zip(*recalls, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=1e-5)
    assert 0 < recalls[0][0].overlap < 1
    torch.testing.assert_close(choices[0], choices[1], atol=1e-4, rtol=1e-4)
