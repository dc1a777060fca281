"""Documents that are read once and asked about: ``hf-kvret read``, ``ask`` and ``shelf``."""
