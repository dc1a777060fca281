"""Patches of transformers that no public seam replaces, one module each.

Every module has ``apply()`` and ``restore()``: applying twice changes nothing more, and
restoring puts back the very objects that were there. Importing this package applies nothing.
"""
