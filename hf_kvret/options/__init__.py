"""TODO options."""
