"""The version of the package; what is built reads it here."""

__version__ = "0.1.0"
