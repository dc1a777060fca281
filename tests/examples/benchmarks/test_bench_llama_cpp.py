"""Steps beside llama.cpp's, with a program in the place of ``llama-bench``.

It looks at its arguments and prints JSON as ``llama-bench`` does, with times that are known: a step
takes ``layers * (1 ms + 1 µs for each token of context)``, with flash attention twice that.
"""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_llama_cpp
import llama_bench
import pytest
import torch
from llama_bench import LlamaBench, check_architecture, find_gguf, write_gguf
from transformers import AutoConfig, PreTrainedConfig

from hf_kvret.cli import main
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.evaluate.measurement import CheckFailed
from hf_kvret.lab.report.results import Results

# Heads that don't fill the width, and three query heads for a KV head.
SIZES = {
    "vocab_size": 120,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
# By the last part of its name, as llama.cpp's loaders declare it: [out, in].
LAYER = {
    "attn_q": (192, 96),
    "attn_k": (64, 96),
    "attn_v": (64, 96),
    "attn_output": (96, 192),
    "ffn_gate": (80, 96),
    "ffn_up": (80, 96),
    "ffn_down": (96, 80),
    "attn_norm": (96,),
    "ffn_norm": (96,),
}
QWEN3 = {"attn_q_norm": (32,), "attn_k_norm": (32,)}
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def config_of(kind: str, **more: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **SIZES, **more)


def numbers(tensor: Any) -> torch.Tensor:
    """A tensor of a GGUFReader, which gives bf16 as bytes."""
    data = torch.from_numpy(tensor.data.copy())
    return data.view(torch.bfloat16) if tensor.tensor_type.name == "BF16" else data


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tensors_are_those_of_llama_cpp(
    kind: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    model = random_model(config_of(kind, tie_word_embeddings=tied), dtype, "cpu", seed=0)
    write_gguf(tmp_path / "model.gguf", model)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    expected = {
        f"blk.{number}.{name}.weight": shape
        for number in range(2)
        for name, shape in (LAYER | (QWEN3 if kind == "qwen3" else {})).items()
    }
    expected |= {"token_embd.weight": (120, 96), "output_norm.weight": (96,)}
    expected |= {} if tied else {"output.weight": (120, 96)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # A GGUF file has the innermost dimension first.
    assert {name: tuple(one.shape[::-1]) for name, one in tensors.items()} == expected
    for name, one in tensors.items():
        assert one.tensor_type.name == ("F32" if len(expected[name]) == 1 else KINDS[dtype]), name
    state = model.state_dict()
    own = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for name, other in own.items():
        result, want = numbers(tensors[name]), state[other]
        assert torch.equal(result, want.float() if want.ndim == 1 else want), name


@pytest.mark.parametrize("shape", ["tiny", "llama-3.1-8b", "qwen3-0.6b"])
def test_shapes_of_known_architectures_are_let_through(shape: str) -> None:
    check_architecture(load_shape(shape).config, shape)


@pytest.mark.parametrize("vocabulary", [False, True])
def test_words_are_made_up_for_what_writes_text(vocabulary: bool, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    model = random_model(config_of("llama"), torch.float32, "cpu", seed=0)
    write_gguf(tmp_path / "model.gguf", model, vocabulary)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == ("llama" if vocabulary else "no_vocab")
    words = fields["tokenizer.ggml.tokens"].contents() if vocabulary else []
    assert len(set(words)) == (120 if vocabulary else 0) and ("\n" in words) == vocabulary


def test_other_architectures_and_sliding_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"phi-4 is a model with type 'phi3', .* llama and qwen3"):
        check_architecture(load_shape("phi-4").config, "phi-4")
    kinds = ["full_attention", "sliding_attention"]
    config = config_of("qwen3", use_sliding_window=True, sliding_window=64, layer_types=kinds)
    with pytest.raises(ValueError, match="a model with layers of sliding_attention"):
        check_architecture(config, "mine")


def test_without_gguf_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match="pip install gguf"):
        find_gguf()


FAKE = r"""
import json, sys
from pathlib import Path

given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
kind = given.pop("-ctk")
assert given.pop("-ctv") == kind
flags = given.pop("-fa")
assert flags == {"f16": "0,1", "q8_0": "1"}[kind], flags
model, steps, depth = Path(given.pop("-m")), int(given.pop("-n")), int(given.pop("-d"))
assert model.is_file(), model
assert given == {"-o": "json", "-r": "1", "-p": "0", "-t": "THREADS", "-ngl": "0"}, given
with open("CALLS", "a") as file:
    print(kind, model.stem, depth, file=file)
layers = int(model.stem.partition("-")[0])
tests = []
for flag in map(int, flags.split(",")):
    step = layers * (1_000_000 + 1000 * depth) * (1 + flag)
    tests.append({
        "build_commit": "b1234abc", "build_number": 6543, "cpu_info": "a processor",
        "gpu_info": "", "backends": "CPU", "model_filename": str(model),
        "model_type": "llama ?B F16", "n_threads": 1, "type_k": kind, "type_v": kind,
        "flash_attn": flag, "n_prompt": 0, "n_gen": steps, "n_depth": depth,
        "avg_ns": step * steps, "stddev_ns": 0, "samples_ns": [step * steps],
        "samples_ts": [1e9 / step],
    })
print(json.dumps(tests, indent=2))
"""
QUICK = ["--context", "256", "--steps", "3", "--warmup", "1", "--caches", "dense"]
MakeProgram = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are empty files, and nobody looks for the package but in tests of the file itself."""
    monkeypatch.setattr(llama_bench, "write_gguf", lambda path, model: path.touch())
    monkeypatch.setattr(bench_llama_cpp, "find_gguf", lambda: None)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeProgram:
    """Makes a program of the given Python source, which the environment names from then on."""

    def make(source: str) -> Path:
        path = tmp_path / "llama-bench"
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("LLAMA_BENCH", str(path))
        return path

    return make


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Where ``fake`` notes its calls."""
    return tmp_path / "calls"


@pytest.fixture
def fake(program: MakeProgram, calls: Path) -> Path:
    """The program that prints known times."""
    threads = str(torch.get_num_threads())
    return program(FAKE.replace("THREADS", threads).replace("CALLS", str(calls)))


def rows_of(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {(cell["cache"], cell["context"]): row for cell, row in Results.load(file)}


def test_llama_cpp_has_rows_among_those_of_caches(
    bench: Callable[..., int],
    fake: Path,
    calls: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, picture, table = (tmp_path / name for name in ("d.json", "d.png", "d.md"))
    files = ["--json", str(file), "--plot", str(picture), "--table", str(table)]
    given = [*QUICK, "--context", "256,1K", "--rounds", "2", "--dtype", "float16", *files]
    assert bench("llama-cpp", *given) == 0
    rows = rows_of(file)
    assert len(rows) == 6
    f16, q8 = rows["llama.cpp f16", 1024], rows["llama.cpp q8_0", 1024]
    # Two layers; codes of values need flash attention, which takes twice as long here.
    assert f16["seconds"] == pytest.approx(2 * 2.024e-3) and f16["timed"] == 6
    assert q8["seconds"] == pytest.approx(4 * 2.024e-3)
    assert f16["steps"] == {"-fa 0": 6} and q8["steps"] == {"-fa 1": 6}
    assert f16["seconds_by_kind"]["-fa 1"] == pytest.approx(4 * 2.024e-3)
    assert f16["llama_cpp"] == "b1234abc (6543)" and f16["fill"] == "prefill"
    # Keys and values of two layers with two heads of 64, behind the last step.
    assert f16["device_bytes"] == f16["full_bytes"] == 2 * 2 * 2 * 64 * 2 * 1027
    assert q8["device_bytes"] == f16["device_bytes"] * 34 // 64
    dense = rows["dense", 1024]
    assert f16["floor_device_bytes"] == pytest.approx(dense["floor_device_bytes"], rel=1e-3)
    # The rounds of all take turns.
    of_1k = [line for line in calls.read_text().splitlines() if line.endswith(" 1024")]
    assert of_1k == ["f16 2-layers 1024", "q8_0 2-layers 1024"] * 2
    text = table.read_text()
    assert "- llama.cpp f16, 1,024 x 1: -fa 0 4.05 ms, -fa 1 8.1 ms" in text
    assert "256 to 1,024 tokens, batch 1: dense " in text
    # 2 layers * 1,024 tokens * 1 µs, and twice that.
    assert "llama.cpp f16 2.05, llama.cpp q8_0 4.1\n" in text
    assert "- llama.cpp: build b1234abc (6543)" in text
    assert picture.stat().st_size > 1000
    # Nothing is measured twice.
    assert bench("llama-cpp", *given) == 0
    assert "6 cells were finished already" in capsys.readouterr().out
    assert len(calls.read_text().splitlines()) == 8


def test_beside_codes_llama_cpp_has_codes(
    bench: Callable[..., int], fake: Path, calls: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="codes are torchao's: extra test")
    given = [*QUICK, "--rounds", "1", "--dtype", "bfloat16", "--weights", "bf16,int4"]
    with pytest.raises(ValueError, match=r"runs .*llama-quantize, and it is not there: build"):
        bench("llama-cpp", *given)
    quantizer = fake.with_name("llama-quantize")
    script = "import sys; open(sys.argv[2], 'w').write(' '.join(sys.argv[3:]))"
    quantizer.write_text(f"#!{sys.executable}\n{script}")
    quantizer.chmod(fake.stat().st_mode)
    file, table = tmp_path / "d.json", tmp_path / "d.md"
    assert bench("llama-cpp", *given, "--json", str(file), "--table", str(table)) == 0
    rows = {(cell["cache"], cell["weights"]): row for cell, row in Results.load(file)}
    names = ["dense", "llama.cpp f16", "llama.cpp q8_0"]
    assert list(rows) == [(name, "bf16") for name in names] + [
        (name, "int4") for name in names[::2]
    ]
    assert calls.read_text().splitlines()[-1] == "q8_0 2-layers-Q4_K_M 256"
    # The file says "Q4_K_M 1" here, so weights are next to nothing beside the rows.
    coded = rows["llama.cpp q8_0", "int4"]
    assert coded["floor_device_bytes"] == pytest.approx(coded["device_bytes"], abs=20)
    assert "| llama.cpp q8_0, int4 weights |" in table.read_text()


def test_fewer_layers_are_scaled(
    bench: Callable[..., int], fake: Path, six_layers: Path, tmp_path: Path
) -> None:
    file = tmp_path / "d.json"
    part = ["--shape", str(six_layers), "--layers", "4", "--rounds", "1"]
    assert bench("llama-cpp", *QUICK, *part, "--json", str(file)) == 0
    row = rows_of(file)["llama.cpp f16", 256]
    assert row["seconds"] == pytest.approx(4 * 1.256e-3)
    assert row["scaled"]["seconds"] == pytest.approx(6 * 1.256e-3)
    assert row["scaled"]["device_bytes"] == pytest.approx(row["device_bytes"] * 6 / 4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import sys; sys.exit('a line\\nfailed to load model')",
            "ended with status 1: failed to load model",
        ),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9: without a word"),
        ("print('| model | t/s |')", "printed '| model | t/s |' in the place of JSON results"),
        ("print('[1]')", "printed '[1]' in the place of JSON results"),
        ("print('[{}]')", "can't be read: KeyError('n_depth')"),
        ("print('[]')", "can't be read: IndexError"),
        (
            'print(\'[{"n_depth": 512, "n_gen": 3, "build_commit": 1, "build_number": 1}]\')',
            "asked for 3 steps behind 256 tokens with -fa 0 and -fa 1, and printed none of them",
        ),
    ],
)
def test_a_program_that_fails_is_told_with_its_reason(
    source: str, message: str, program: MakeProgram, tmp_path: Path
) -> None:
    bench = LlamaBench(program(source), tmp_path, "f16")
    with pytest.raises(CheckFailed, match=re.escape(message)):
        bench.sample(subject(), context=256, steps=3)


def subject() -> Any:
    """As much of a model as is looked at before there are times."""
    return SimpleNamespace(layers=2, model=None, weights=SimpleNamespace(held=0))


def test_a_disk_without_room_is_named(
    fake: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(llama_bench.shutil, "disk_usage", lambda folder: used)
    assert "set TMPDIR to a folder with more room" in refused("llama-cpp", *QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,2"], "decodes one sequence: give --batch 1"),
        (["--shape", "mistral-7b-v0.3"], "mistral-7b-v0.3 is a model with type 'mistral'.*qwen3"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], message: str, fake: Path, bench: Callable[..., int]
) -> None:
    with pytest.raises(ValueError, match=message):
        bench("llama-cpp", *QUICK, *arguments)


def test_without_a_program_the_error_names_the_remedy(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_BENCH", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"it is not on PATH: build it as docs/benchmark\.md says"):
        bench("llama-cpp", *QUICK)
    monkeypatch.setenv("LLAMA_BENCH", "/nowhere/llama-bench")
    with pytest.raises(ValueError, match="no program at /nowhere/llama-bench: build it"):
        bench("llama-cpp", *QUICK)


def test_bench_decode_has_it_as_an_opponent(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, given = tmp_path / "d.json", ["--device", "cpu", *QUICK, "--rounds", "1"]
    opponents = ["--opponents", "llama.cpp", "--json", str(file)]
    assert main(["bench", "decode", *given, *opponents]) == 0
    assert ("llama.cpp q8_0", 256) in rows_of(file)
    # A file that the script goes on with.
    assert main(["bench", "llama-cpp", *given, "--json", str(file)]) == 0
    assert "3 cells were finished already" in capsys.readouterr().out
    for arguments in (["decode", "--opponents", "vllm"], ["memory", "--opponents", "llama.cpp"]):
        with pytest.raises(SystemExit):
            main(["bench", *arguments])
    errors = capsys.readouterr().err
    assert "choose among llama.cpp" in errors and "unrecognized arguments: --opponents" in errors
