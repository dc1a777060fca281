"""Shared by all commands of ``hf-kvret``: arguments, options, help, and how a run ends."""
