"""Measuring what a cache costs in answers and saves in bytes and time."""
