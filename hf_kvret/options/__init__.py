"""Options that every retrieval cache has, and their checks."""
