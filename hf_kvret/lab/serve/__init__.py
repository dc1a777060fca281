"""transformers' server with retrieval caches."""
