"""The seam to transformers: attention functions, masks, prompts in chunks, requests."""
