"""Parts of ``examples/app.py``: all but ``page`` and ``server`` do without Gradio."""
