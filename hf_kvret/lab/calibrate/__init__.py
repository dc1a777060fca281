"""TODO lab/calibrate."""
