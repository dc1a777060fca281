"""Results in files, and the pages that are made of them."""
