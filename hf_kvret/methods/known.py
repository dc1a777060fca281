"""The methods that ``hf_kvret.register`` made known."""

from hf_kvret.cache import RetrievalCache

METHODS: dict[str, type[RetrievalCache]] = {}
"""By name; ``hf_kvret.registered_methods()`` gives users a copy."""
