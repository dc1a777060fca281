"""``hf-kvret fits``: what caches would hold, from caches that are filled without their contents."""
