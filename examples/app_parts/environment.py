"""What variables of the environment may say to Gradio: nothing that opens the page to others."""

from __future__ import annotations

import os

# Where it keeps uploads.
_HARMLESS = ("GRADIO_TEMP_DIR",)


def close_environment() -> None:
    """Drop Gradio's settings and turn its analytics off, before Gradio is imported.

    They could serve folders, other machines, or pages of other sites, and some have no argument
    that overrides them: an empty ``allowed_paths`` falls back to ``GRADIO_ALLOWED_PATHS``.
    """
    for name in list(os.environ):
        if name.startswith("GRADIO_") and name not in _HARMLESS:
            del os.environ[name]
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
