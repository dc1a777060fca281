"""The small models that are ours: they need no network.

``needle`` ships with the package; ``reference``, ``reference-latent`` and ``reference-books`` lie
in the examples of a checkout: that which the package is run from, or the folder where the command
is run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

_ROOT = Path(__file__).parents[3]
BUNDLED_MODEL = Path(__file__).parent / "needle_llama"


def _example_model(folder: str) -> Path:
    folders = [root / "examples" / folder for root in (_ROOT, Path.cwd())]
    return next((path for path in folders if (path / "model.safetensors").is_file()), folders[0])


REFERENCE_MODEL = _example_model("reference_llama")
LATENT_MODEL = _example_model("reference_latent")
BOOKS_MODEL = _example_model("reference_books")
OUR_MODELS = {
    "needle": BUNDLED_MODEL,
    "reference": REFERENCE_MODEL,
    "reference-latent": LATENT_MODEL,
    "reference-books": BOOKS_MODEL,
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
