"""The small models that are ours: they need no network.

``needle`` ships with the package; ``reference``, ``reference-latent`` and ``reference-books`` lie
in the examples of a checkout: that which the package is run from, or the folder where the command
is run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

_ROOT = Path(__file__).parents[2]
BUNDLED_MODEL = Path(__file__).parent / "needle_llama"


def _example_model(folder: str) -> Path:
    places = [root / "examples" / folder for root in (_ROOT, Path.cwd())]
    return next((place for place in places if (place / "model.safetensors").is_file()), places[0])


REFERENCE_MODEL = _example_model("reference_llama")
LATENT_MODEL = _example_model("reference_latent")
BOOKS_MODEL = _example_model("reference_books")


def default_model() -> str:
    """What ``--model`` means when it is not given: ``reference`` in a checkout, else ``needle``."""
    return "reference" if (REFERENCE_MODEL / "model.safetensors").is_file() else "needle"


def load_bundled_model(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The bundled Llama in eval mode; its model card is ``needle_llama/README.md``.

    Raises:
        FileNotFoundError: the weights are not in this installation.
    """
    if not (BUNDLED_MODEL / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the bundled model is missing from {BUNDLED_MODEL}: install hf_kvret again, or train "
            "it with examples/train_needle_model.py"
        )
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=dtype, local_files_only=True)
    return model.to(device).eval()
