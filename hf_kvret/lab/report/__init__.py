"""TODO lab/report."""
