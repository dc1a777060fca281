"""The subject of an evaluation: a model with its tokenizer, by path, hub id or a name of ours."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import is_accelerate_available

from hf_kvret.generate.attach import attach
from hf_kvret.lab.evaluate.bundled import OUR_MODELS, SMOLLM2_MODEL, example_model, expand_smollm2
from hf_kvret.lab.evaluate.failures import first_line
from hf_kvret.saved.folder import plain_bytes
from hf_kvret.saved.identity import facts_of, printable
from hf_kvret.shelf.questions import plain_generation_config

_KNOWN = {**OUR_MODELS, "smollm2": SMOLLM2_MODEL}
# Broken files of a model make transformers, torch and safetensors raise these.
_UNLOADABLE = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError),
    *(SafetensorError, UnpicklingError),
)


@dataclass(frozen=True)
class Subject:
    """A model that is ready to be measured, and what identifies it.

    Attributes:
        name: as the user gave it.
        model: in eval mode, switched to our attention (other caches pass through it unchanged).
        tokenizer: None where the model has none, as the bundled needle model.
        no_tokenizer: why a tokenizer could not be loaded; empty where it was, or none was tried.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    no_tokenizer: str = ""

    @property
    def device(self) -> torch.device:
        """Where input tokens belong; a model's parts that lie elsewhere get them from there."""
        # Weights on a disk are on no device.
        real = (one.device for one in self.model.parameters() if not one.is_meta)
        return next(real, torch.device("cpu"))

    def need_tokenizer(self, task: str) -> PreTrainedTokenizerBase:
        """The tokenizer; ValueError when the model has none and ``task`` needs text."""
        if self.tokenizer is None:
            reason = f" ({self.no_tokenizer})" if self.no_tokenizer else ""
            raise ValueError(
                f"{task} needs a tokenizer, and {self.name!r} has none{reason}: give another "
                "--model (reference, in a checkout), or put the tokenizer's files "
                "(tokenizer.json) into the model's folder"
            )
        return self.tokenizer

    def describe(self) -> dict[str, Any]:
        """Name, size, type and a fingerprint of all that its folder holds, for JSON."""
        return {
            "model": self.name,
            "class": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "fingerprint": self._fingerprint(),
        }

    def _fingerprint(self) -> str:
        """The hash of configuration, ends of a text, a sample of every weight, and tokenizer."""
        digest = hashlib.sha256(plain_bytes(facts_of(self.model.config)))
        digest.update(repr(self.model.generation_config.eos_token_id).encode())
        for name, weight in self.model.state_dict().items():
            if weight.is_meta:
                weight = offloaded(self.model, name)
            flat = weight.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 64)].float().cpu()
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            digest.update(sample.numpy().tobytes())
        if self.tokenizer is not None:
            words = sorted(self.tokenizer.get_vocab().items())
            digest.update(repr((words, self.tokenizer.chat_template)).encode())
        return digest.hexdigest()[:16]


def offloaded(model: PreTrainedModel, name: str) -> torch.Tensor:
    """The weight ``name`` of a model that accelerate spread, from where it waits for its layer."""
    path, _, own = name.rpartition(".")
    hook: Any = model.get_submodule(path)._hf_hook
    hooks = getattr(hook, "hooks", (hook,))
    return next(one.weights_map[own] for one in hooks if getattr(one, "weights_map", None))


def model_folder(name: str) -> Path:
    """Where the model ``name`` lies, as for ``load_subject``; for a hub id no such folder is."""
    return _KNOWN.get(name, Path(name))


def load_subject(
    name: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    device_map: str | None = None,
) -> Subject:
    """Load a model and its tokenizer.

    Args:
        name: ``needle``, ``reference``, ``reference-latent``, ``reference-books``, ``smollm2``,
            else a folder or a hub id.
        dtype: of the weights.
        device: where they are put.
        device_map: ``"auto"`` spreads them over all devices instead; None doesn't.

    Raises:
        FileNotFoundError: the weights of a model of ours are not installed.
        ModuleNotFoundError: ``device_map`` without accelerate.
        ValueError: no model there, or one that can't be loaded or that retrieval can't serve; the
            message says what was tried.
    """
    if device_map is not None and not is_accelerate_available():
        raise ModuleNotFoundError("--device-map needs accelerate: pip install accelerate")
    path = str(model_folder(name))
    if name == "smollm2":
        expand_smollm2()
    if name in OUR_MODELS:
        example_model(name)
    if name not in _KNOWN:
        print(f"loading the model {printable(name)} ...", file=sys.stderr)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map)
    except _UNLOADABLE as error:
        raise ValueError(
            f"--model {name}: can't be loaded ({first_line(error)}). Give a folder with "
            f"config.json and weights, a hub id, or one of {', '.join(_KNOWN)}"
        ) from error
    tokenizer, reason = None, ""
    if name != "needle":
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except _UNLOADABLE as error:
            # Tasks that work on token ids go on without; the others ask need_tokenizer.
            reason = first_line(error)
    model = (model if device_map else model.to(device)).eval()
    attach(model)
    model.generation_config, dropped = plain_generation_config(model)
    if dropped:
        print(f"left out of its generation_config: {', '.join(dropped)}", file=sys.stderr)
    return Subject(name, model, tokenizer, reason)
