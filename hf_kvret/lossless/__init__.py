"""Answers of full attention at the speed of retrieval: the cache drafts, an exact pass verifies."""
