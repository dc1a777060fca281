"""Which types of models are served: every one of transformers that generates text.

``scan`` asks the library about default configurations, ``trial`` decodes with small random models,
``table`` writes both down, and ``hf-kvret models`` shows them.
"""
