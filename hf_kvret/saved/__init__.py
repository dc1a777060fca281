"""Saved caches: files, and which model and text filled one."""
