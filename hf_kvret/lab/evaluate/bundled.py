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


def our_model(name: str) -> Path:
    """The folder of one of ``OUR_MODELS``.

    Raises:
        FileNotFoundError: it is not there; says what helps.
    """
    folder = OUR_MODELS[name]
    if (folder / "model.safetensors").is_file():
        return folder
    if name == "needle":
        raise FileNotFoundError(
            f"the bundled model is missing from {folder}: install hf_kvret again, or train it "
            "with examples/train_needle_model.py"
        )
    raise FileNotFoundError(
        f"the model {name} is in the examples of hf-kvret's repository, not in the package: run "
        "this in the folder of a checkout, take needle, or put a model of yours in its place"
    )


def example_model(name: str) -> Path:
    """The folder of ``reference``, ``reference-latent`` or ``reference-books``.

    Raises:
        ValueError: another name.
        FileNotFoundError: no checkout has it; says what helps.
    """
    names = [one for one in OUR_MODELS if one != "needle"]
    if name not in names:
        raise ValueError(f"there is no model {name!r}: choose one of {', '.join(names)}")
    return our_model(name)


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
    folder = our_model("needle")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()
