"""Time, memory and floors of caches on models of true shape: ``hf-kvret bench``."""
