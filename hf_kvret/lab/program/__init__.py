"""TODO lab/program."""
