"""``hf-kvret calibrate``: what it makes, where that goes, what is held out, mistakes."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret import A2ATSCache, AquaKVCache
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.command import A2ATSOptions, AquaOptions, make_corpus
from hf_kvret.lab.calibrate.study import Corpus, calibrate
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.program.options import add_options, read_options
from hf_kvret.lab.program.program import Parser
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS
from hf_kvret.testing.scenario import prompt

from ...artifacts.artifact_folder import save_model, write_text

PAGE = Path(__file__).parents[3] / "docs" / "calibration.md"
CODEBOOKS = ("--codewords", "8", "--distance", "64", "--rounds", "3")
SHORT = ("--tokens", "400", "--length", "100", "--uuid-tokens", "100")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers and the tokenizer of the reference model."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", config)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("texts") / "river.txt")


@pytest.fixture
def sources(model_dir: Path, text: Path, tmp_path: Path) -> list[Any]:
    """What is learned from, and where the artifact goes."""
    return ["--model", model_dir, "--text", text, "--out", tmp_path / "out"]


def parsed(cls: type[Any], *arguments: str) -> Any:
    parser = Parser()
    add_options(parser, cls)
    words = ["--model", "m", "--text", __file__, "--out", "o", *arguments]
    return read_options(cls, parser.parse_args(words))


def test_a_command_makes_the_codebooks_of_the_model(
    sources: list[Any], model_dir: Path, tmp_path: Path, program: Any
) -> None:
    more = ["--space", "rotated", "--seed", 3, "--name", "me/it", "--dtype", "bfloat16"]
    shown = program("calibrate", "a2ats", *sources, *CODEBOOKS, *SHORT, *more).out
    assert f"wrote {tmp_path / 'out'}" in shown and "score error" in shown
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out", method="a2ats")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    artifact.check(model.config)
    assert artifact.check_weights(model) > 5
    expected = {"space": "rotated", "seed": 3, "codewords": 8, "window": 64}
    assert artifact.options.items() >= expected.items()
    assert artifact.model.name == "me/it" and artifact.data["held_out_sequences"] == 1
    assert artifact.data["tokens"] == 400 and artifact.data["uuid_tokens"] == 100
    assert artifact.data["text"].startswith("river.txt ")
    assert artifact.tensors["layers.2.codewords"].shape == (2, 8, 16)
    # No path of this machine is shared with the artifact.
    for name in ("config.json", "README.md"):
        assert str(tmp_path.parent) not in (tmp_path / "out" / name).read_text()


def test_a_command_makes_the_predictors_of_the_model(
    sources: list[Any], model_dir: Path, tmp_path: Path, program: Any
) -> None:
    words = ["calibrate", "aqua", *sources, *SHORT[:4], "--held-out", 0]
    assert "value error unpredicted" in program(*words).out
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out", method="aqua")
    artifact.check(AutoConfig.from_pretrained(model_dir))
    # UUIDs are for those who ask.
    assert artifact.data["tokens"] == 400 and "uuid_tokens" not in artifact.data
    assert artifact.model.name == "tiny-llama"
    assert all(row["key_error"] is None for row in artifact.quality)
    roles = [artifact.options["layers"][str(n)]["role"] for n in range(3)]
    assert roles == ["anchor", "predicted", "predicted"]
    assert artifact.tensors["layers.2.value.weight"].shape == (32, 64)
    assert not [name for name in artifact.tensors if name.startswith("layers.0.key")]


def test_every_option_of_aqua_reaches_its_calibration() -> None:
    other = {"bits": 3, "first_bits": "auto", "group": 8, "ridge": 0.5, "sinks": 2, "seed": 9}
    other |= {"space": "after", "anchor_mean": True}
    usual = AquaCalibration().options()
    assert usual.keys() == other.keys() and all(other[name] != usual[name] for name in other)
    line = ["--anchor-mean"]
    for name, value in other.items():
        if value is not True:
            line += [f"--{name.replace('_', '-')}", str(value)]
    assert parsed(AquaOptions, *line).calibration().options() == other
    assert parsed(AquaOptions, "--first-bits", "16").first_bits == 16


def test_the_bundled_model_learns_from_its_own_language(tmp_path: Path, program: Any) -> None:
    where = ["calibrate", "a2ats", "--model", "needle", "--out", tmp_path / "out"]
    program(*where, *CODEBOOKS, "--tokens", 512, "--length", 128)
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "out")
    assert artifact.data["documents"] == "needle language" and artifact.data["tokens"] == 512
    assert all(0 < row["score_error"] < 1 for row in artifact.quality)
    error = program(*where, "--uuid-tokens", "2K", status=2).err
    assert "leave --text and --uuid-tokens out" in error


# Each calibration of latent attention has options, and others make its cache exact.
LATENT: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "a2ats": (A2ATSCache, CODEBOOKS, {}),
    "aqua": (AquaKVCache, ("--bits", "4"), {"bits": 16, "first_bits": 16}),
}


@pytest.fixture(scope="module")
def latent_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random DeepSeek-V3 of two layers and the tokenizer of the reference model."""
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek"
    return save_model(folder, LATENT_MODELS["deepseek_v3"].config())


@pytest.mark.parametrize("method", LATENT)
def test_latent_attention_goes_from_a_folder_to_generate(
    method: str, latent_dir: Path, text: Path, program: Any
) -> None:
    cache_class, more, exact = LATENT[method]
    out = latent_dir / method
    program("calibrate", method, "--model", latent_dir, "--text", text, "--out", out, *more, *SHORT)
    artifact = CalibrationArtifact.from_pretrained(out, method=method)
    facts = artifact.model.facts
    assert (facts["kv_lora_rank"], facts["head_dim"]) == (16, 24)
    assert len(artifact.quality) == 2
    model = AutoModelForCausalLM.from_pretrained(latent_dir).eval()
    greedy = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt(2, 120), **greedy)
    # The artifact is found in the model's own folder.
    cache = cache_class(model.config, **COVERING_OPTIONS, **exact)
    assert torch.equal(model.generate(prompt(2, 120), past_key_values=cache, **greedy), expected)
    assert all(layer.selected for layer in cache.retrieval_layers)
    named = {"cache_implementation": method, "cache_config": COVERING_OPTIONS | exact}
    assert torch.equal(model.generate(prompt(2, 120), **named, **greedy), expected)
    hf_kvret.restore(model)
    with torch.no_grad():
        first, second = (layer.self_attn for layer in model.model.layers)
        for projection in (first.kv_b_proj, second.kv_b_proj, second.o_proj):
            projection.weight.mul_(1.5)
    other = cache_class(model.config, **COVERING_OPTIONS)
    with pytest.raises(ValueError, match=r"other weights|sampled parameters differ"):
        other.check_model(model)
    # Rows of as many numbers, which mean something else.
    plain = {name: value for name, value in model.config.to_dict().items() if name != "head_dim"}
    for changes, message in (
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 16}, "made for kv_lora_rank=16, this model has 8"),
        ({"qk_nope_head_dim": 24}, "made for qk_nope_head_dim=16, this model has 24"),
        ({"rope_interleave": False}, "made for rope_interleave=True, this model has False"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_class(type(model.config).from_dict(plain | changes), artifact=str(out))


def test_the_held_out_text_is_the_end_of_the_text(model_dir: Path, text: Path) -> None:
    subject = load_subject(str(model_dir))

    def corpus(*more: str) -> Any:
        options = parsed(A2ATSOptions, "--text", str(text), *SHORT, *more)
        return make_corpus(options, subject)

    made = corpus()
    assert [len(ids) for ids in made.sequences] == [100] * 5
    words = subject.need_tokenizer("test").decode
    assert "The river" not in words(made.sequences[0])
    read = " ".join(words(ids) for ids in made.sequences[1:])
    assert read.index("1. The") < read.index("9. The")
    # A share of the text, at least one sequence and never all.
    shares = {"0": 0, "0.1": 1, "0.5": 2, "0.99": 3}
    assert {share: corpus("--held-out", share).held_out for share in shares} == shares
    few = r"--held-out 0\.1 of one sequence with 100 tokens: .* shorter --length or --held-out 0"
    with pytest.raises(ValueError, match=few):
        corpus("--tokens", "100")
    assert corpus("--tokens", "100", "--held-out", "0").held_out == 0
    assert len(corpus("--uuid-tokens", "0").sequences) == 4


# A model that is not there would be missed if it were looked for: these are said before.
NO_MODEL = "calibrate a2ats --model NONE --out OUT"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{NO_MODEL} --text FILE --out FILE", r"--out: no file can be written to .*file \("),
        (f"{NO_MODEL} --text FILE --out FOREIGN", "a new folder, for instance MODEL/a2ats"),
        (f"{NO_MODEL} --text no.txt", "--text no.txt: no such file"),
        (NO_MODEL, "give --text FILE"),
        (f"{NO_MODEL} --text FILE --codewords 40000", "codewords=40000 must be at least 1 and at"),
        (f"{NO_MODEL} --text FILE --device cuda:99", "no CUDA device here|the last CUDA device"),
        (f"{NO_MODEL} --text FILE", "can't be loaded"),
        ("SOURCES --tokens 1M", r"--tokens 1048576: the text has \d+ tokens; give more text"),
        ("SOURCES --length 2K --uuid-tokens 2K --held-out 0", "2048 tokens, but the model knows"),
        ("AQUA --group 64", "group=64 does not divide the 32 numbers of keys"),
        ("AQUA --sinks 100", "sinks=100 of sequences of at most 100 tokens: .* --sinks"),
    ],
)
def test_mistakes_are_one_line_each(
    words: str,
    message: str,
    sources: list[Any],
    tmp_path: Path,
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "file").write_text("x")
    (tmp_path / "config.json").write_bytes(b'{"model_type": "llama"}')
    places = {"NONE": "none", "OUT": "out", "FILE": "file", "FOREIGN": ""}
    stand = {name: [tmp_path / place] for name, place in places.items()}
    stand["SOURCES"] = ["calibrate", "a2ats", *sources, *CODEBOOKS, *SHORT]
    stand["AQUA"] = ["calibrate", "aqua", *sources, *SHORT]
    line = [one for word in words.split() for one in stand.get(word, [word])]
    assert re.search(message, program(*line, status=2).err.splitlines()[-1])
    assert not (tmp_path / "out" / "config.json").exists()


TEXTS = Corpus(list(torch.arange(1, 101).view(2, 50)), 0, {"text": "numbers"})


def test_more_codewords_than_tokens_are_refused_and_as_many_are_not(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    many, as_many = (A2ATSCalibration(codewords=n, distance=32, rounds=1) for n in (101, 100))
    words = "codewords=101 of 100 tokens: give more --tokens or fewer --codewords"
    with pytest.raises(ValueError, match=words):
        calibrate(llama, TEXTS, many, tmp_path, progress=False)
    result = calibrate(llama, TEXTS, as_many, tmp_path, progress=False)
    assert result.tensors["layers.0.codewords"].shape[1] == 100


def test_the_page_names_the_options_of_the_commands(program: Any) -> None:
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    for command in (["calibrate", "a2ats"], ["calibrate", "aqua"], ["inspect"]):
        offered = set(re.findall(r"--[\w-]+", program(*command, "--help").out)) - {"--help"}
        calls = re.findall(rf"hf-kvret {' '.join(command)}[^\n`]*", page)
        used = set(re.findall(r"--[\w-]+", " ".join(calls)))
        assert calls and used <= offered
        named = set(re.findall(r"`(--[\w-]+)", page)) | used
        assert not offered - named, "options that the page does not name"
