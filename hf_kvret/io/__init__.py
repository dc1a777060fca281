"""What goes in and out of a cache: saved caches and reports."""
