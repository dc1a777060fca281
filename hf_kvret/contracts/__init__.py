"""TODO contracts."""
