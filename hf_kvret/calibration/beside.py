"""The artifact that lies in a model's own folder."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig


def artifact_beside(config: PreTrainedConfig, method: str) -> str:
    """The folder named ``method`` inside the folder that the model was loaded from.

    Raises:
        ValueError: the model came from elsewhere, or has none; says how to make one.
    """
    home = getattr(config, "_name_or_path", "")
    folder = Path(home) / method
    if not home or not folder.is_dir():
        raise ValueError(
            f"{method} needs a calibration artifact of the model: pass "
            f"artifact='folder-or-hub-id', or make one with `hf-kvret calibrate {method} --model "
            f"{home or 'MODEL'} --text FILE --out DIR`"
        )
    return str(folder)
