"""How methods learn about a model: ``hf-kvret calibrate``."""
