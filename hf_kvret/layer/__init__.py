"""A layer of a cache: window, decode step, exact attention, latents."""
