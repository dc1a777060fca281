"""llama.cpp's ``llama-bench``, run on the model that the caches are measured with."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.lab.bench.filling import Subject
from hf_kvret.lab.bench.floors import Floor
from hf_kvret.lab.bench.model_measurement import ModelMeasurement, TimedSample, timed_row
from hf_kvret.lab.bench.shapes import WeightBytes, random_model, weight_bytes
from hf_kvret.lab.evaluate.measurement import CheckFailed, Row
from hf_kvret.lab.evaluate.reader import Usage
from hf_kvret.models.compatibility import layer_shape, layer_shapes

ARCHITECTURES = ("llama", "qwen3")
"""Model types that ``write_gguf`` knows, which llama.cpp calls by the same names."""

_FILE_TYPES = {
    torch.float32: "ALL_F32",
    torch.float16: "MOSTLY_F16",
    torch.bfloat16: "MOSTLY_BF16",
}


def find_gguf() -> Any:
    """The module of llama.cpp's own package.

    Raises:
        ModuleNotFoundError: it is not installed; names the remedy.
    """
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "models are written for llama.cpp with the package gguf: pip install gguf"
        ) from error


def check_architecture(
    config: PreTrainedConfig, shape: str, option: str = "--opponents llama.cpp"
) -> None:
    """ValueError for a model that ``write_gguf`` can't write; ``shape`` is the user's name of it.

    Layers of sliding attention are refused too: for these architectures llama.cpp has none.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if config.model_type in ARCHITECTURES and not kinds:
        return
    what = f"layers of {', '.join(sorted(kinds))}" if kinds else f"type {config.model_type!r}"
    raise ValueError(
        f"{option}: {shape} is a model with {what}, and for llama.cpp only "
        f"{' and '.join(ARCHITECTURES)} with full attention are written: give one of these, as "
        f"llama-3.1-8b or qwen3-0.6b, or leave {option.split()[0]} out"
    )


def write_gguf(path: Path, model: PreTrainedModel, vocabulary: bool = False) -> None:
    """Write the weights of ``model``, a model of ``ARCHITECTURES`` on the CPU, in its dtype.

    Vectors are written in float32, as llama.cpp wants its norms. The file is good for measuring
    time, not for text: it has no scaling of RoPE, the rows of a Llama's queries and keys stay in
    transformers' order, and there are no words, or with ``vocabulary`` made-up ones, which a
    program needs that writes text.

    Raises:
        ModuleNotFoundError: the package gguf is not installed.
        ValueError: a tensor of the model has no name in llama.cpp.
    """
    gguf, config = find_gguf(), model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    writer = gguf.GGUFWriter(path, config.model_type)
    _write_sizes(writer, config)
    writer.add_tokenizer_model("llama" if vocabulary else "no_vocab")
    if vocabulary:
        # A server reads short texts of its own at its start: characters, and the mark of a blank.
        words = ["<unk>", "<s>", "</s>", "\u2581", *map(chr, range(1, 128))]
        words += [f"w{number} " for number in range(len(words), config.vocab_size)]
        writer.add_token_list(words[: config.vocab_size])
        writer.add_token_scores([0.0] * config.vocab_size)
        writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
        writer.add_add_bos_token(False)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[model.dtype]])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            # llama.cpp takes the embedding where there is no head.
            continue
        name = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"llama.cpp has no name for {own} of {config.model_type}")
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
        elif tensor.dtype == torch.bfloat16:
            # numpy has no such numbers: their bytes.
            data, kind = tensor.view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: PreTrainedConfig) -> None:
    dim = layer_shape(config, 0).head_dim
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


LLAMA_CPP = "llama.cpp"
PROGRAM = "llama-bench"
VARIABLE = "LLAMA_BENCH"
"""Of the environment: the program, where it is not on PATH."""
# An error shows so many characters of what a program printed.
_TOLD = 200


class RowType(NamedTuple):
    """How llama.cpp keeps keys and values.

    Attributes:
        bytes: of a number, scales included.
        flags: of flash attention that allow it; codes of values need it.
    """

    bytes: float
    flags: tuple[str, ...]


# q8_0 has two bytes of scale for 32 numbers.
ROW_TYPES: Mapping[str, RowType] = {
    "f16": RowType(2, ("-fa 0", "-fa 1")),
    "q8_0": RowType(34 / 32, ("-fa 1",)),
}
"""By their names in llama.cpp, which ``-ctk`` and ``-ctv`` take."""


FILES: Mapping[str, str] = {"int8": "Q8_0", "int4": "Q4_K_M"}
"""What ``llama-quantize`` makes of a model where the caches' has such weights."""
QUANTIZE = "llama-quantize"


def find_quantizer() -> Path:
    """The ``llama-quantize`` beside ``find_program``; ValueError without one."""
    path = find_program().with_name(QUANTIZE)
    if not path.is_file():
        raise ValueError(
            f"--opponents {LLAMA_CPP} with --weights {' or '.join(FILES)} runs {path}, and it is "
            f"not there: build {QUANTIZE} beside {PROGRAM}, as docs/benchmark.md says"
        )
    return path


def find_program() -> Path:
    """The file that ``LLAMA_BENCH`` names, or else the ``llama-bench`` on PATH.

    Raises:
        ValueError: there is none, or it can't be run; names the remedy.
    """
    named = os.environ.get(VARIABLE)
    # A bare name that is given is a file here, not one on PATH.
    result = shutil.which(Path(named).expanduser().absolute() if named else PROGRAM)
    if result is None:
        where = f"there is no program at {named}" if named else "it is not on PATH"
        raise ValueError(
            f"--opponents {LLAMA_CPP} runs {PROGRAM}, and {where}: build it as "
            f'docs/benchmark.md says ("{LLAMA_CPP}"), and put it on PATH or set {VARIABLE} to its '
            "path"
        )
    return Path(result)


@dataclass(frozen=True)
class LlamaSample:
    """What one turn of ``llama-bench`` brings home.

    Attributes:
        seconds: of a step, by the flag of flash attention: the mean of all steps of the turn.
        floor: of a step behind the last token.
        usage: of keys and values then.
        build: the commit and number of the build, as llama.cpp tells them.
    """

    seconds: Mapping[str, float]
    floor: Floor
    usage: Usage
    build: str


@dataclass(frozen=True)
class LlamaBench:
    """Decode steps of llama.cpp with one type of keys and values, on as many threads as torch.

    Attributes:
        program: ``llama-bench``.
        folder: where models are written, and read again in the next turn.
        kind: of ``ROW_TYPES``.
        weights: of the caches' model: of ``FILES``, or others, which are those of its dtype.
    """

    program: Path
    folder: Path
    kind: str
    weights: str = ""

    def held_bytes(self, subject: Subject, length: int) -> float:
        """Keys and values of ``length`` tokens of one sequence."""
        return self._numbers(subject) * length * ROW_TYPES[self.kind].bytes

    def needed_bytes(self, subject: Subject, length: int) -> int:
        """What the program takes: the weights, and keys and values twice, for it keeps a copy."""
        return int(self._plain(subject).held + 2 * self.held_bytes(subject, length))

    def sample(self, subject: Subject, context: int, steps: int) -> LlamaSample:
        """Read ``context`` tokens and time ``steps`` more, with each flag that there is.

        Raises:
            CheckFailed: the program fails, or prints something else than its results.
            ValueError: no room for the model on the disk.
        """
        flags = ROW_TYPES[self.kind].flags
        path = self._file(subject)
        command = [str(self.program), "-m", str(path), "-o", "json", "-r", "1"]
        command += ["-p", "0", "-n", str(steps), "-d", str(context)]
        command += ["-t", str(torch.get_num_threads()), "-ngl", "0"]
        command += ["-ctk", self.kind, "-ctv", self.kind]
        command += ["-fa", ",".join(flag.split()[1] for flag in flags)]
        tests = self._tests(command)
        try:
            seconds = {
                f"-fa {int(one['flash_attn'])}": one["samples_ns"][0] / 1e9 / steps
                for one in tests
                if (one["n_depth"], one["n_gen"]) == (context, steps)
            }
            build = f"{tests[0]['build_commit']} ({tests[0]['build_number']})"
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckFailed(
                f"{self.program} printed results that can't be read: {error!r}"
            ) from error
        if set(seconds) != set(flags):
            raise CheckFailed(
                f"{self.program} was asked for {steps} steps behind {context} tokens with "
                f"{' and '.join(flags)}, and printed {', '.join(seconds) or 'none'} of them"
            )
        length = context + steps
        stored_bytes = self.held_bytes(subject, length)
        plain = self._numbers(subject) * length * subject.model.dtype.itemsize
        weights = self._plain(subject)
        read = float(weights.read + weights.row)
        if self.weights in FILES:
            # Types of tensors differ; the share that a step reads is about that of their numbers.
            read *= path.stat().st_size / weights.held
        floor = Floor(read + stored_bytes, 0.0)
        return LlamaSample(
            seconds, floor, Usage(int(stored_bytes), 0, plain, 0, 0, int(stored_bytes)), build
        )

    def row(
        self,
        measurement: ModelMeasurement,
        samples: Mapping[int, Sequence[LlamaSample]],
    ) -> Row:
        """As of a cache, with the flag that was quicker; ``seconds_by_kind`` has the others too.

        The program tells no single steps: median and quartiles are over the rounds' means.
        """
        rounds, steps = samples[measurement.built], measurement.steps
        flags = ROW_TYPES[self.kind].flags
        by_flag = {flag: median(one.seconds[flag] for one in rounds) for flag in flags}
        best = min(by_flag, key=lambda flag: by_flag[flag])
        timed = {
            layers: [TimedSample([one.seconds[best]], one.floor, one.usage, {}) for one in those]
            for layers, those in samples.items()
        }
        return timed_row(measurement, 1, timed) | {
            "timed": steps * len(rounds),
            "device_peak_bytes": rounds[-1].usage.device_bytes,
            "steps": {best: steps * len(rounds)},
            "seconds_by_kind": by_flag,
            "llama_cpp": rounds[-1].build,
        }

    def _numbers(self, subject: Subject) -> int:
        """Of keys and values of a token."""
        return 2 * sum(shape.width for shape in layer_shapes(subject.model.config))

    def _plain(self, subject: Subject) -> WeightBytes:
        """Of the model in its dtype."""
        if self.weights not in FILES:
            return subject.weights
        return weight_bytes(subject.model.config, subject.model.dtype)

    def _file(self, subject: Subject) -> Path:
        """The model, written if it isn't there."""
        kind = FILES.get(self.weights)
        path = self.folder / f"{subject.layers}-layers{f'-{kind}' if kind else ''}.gguf"
        if not path.exists():
            free, held = shutil.disk_usage(self.folder).free, self._plain(subject).held
            if held * (2 if kind else 1) > free:
                raise ValueError(
                    f"--opponents {LLAMA_CPP} writes {held / 1e9:.1f} GB to {self.folder}, where "
                    f"{free / 1e9:.1f} GB are free: set TMPDIR to a folder with more room, or give "
                    "--layers"
                )
            if kind is None:
                write_gguf(path, subject.model)
                return path
            model, plain = subject.model, path.with_suffix(".plain")
            write_gguf(plain, random_model(model.config, model.dtype, "cpu", subject.seed))
            threads = str(torch.get_num_threads())
            _output([str(find_quantizer()), str(plain), str(path), kind, threads])
            plain.unlink()
        return path

    def _tests(self, command: Sequence[str]) -> list[dict[str, Any]]:
        """The tests that the program printed."""
        printed = _output(command)
        try:
            tests = json.loads(printed)
        except json.JSONDecodeError:
            tests = None
        if not isinstance(tests, list) or not all(isinstance(one, dict) for one in tests):
            output = " ".join(printed.split())[:_TOLD]
            raise CheckFailed(f"{self.program} printed {output!r} in the place of JSON results")
        return tests


def _output(command: Sequence[str]) -> str:
    """What a program prints; CheckFailed where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        raise CheckFailed(f"{command[0]} ended with status {done.returncode}: {why[0]}")
    return done.stdout
