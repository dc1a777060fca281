"""Saved caches and reports."""
