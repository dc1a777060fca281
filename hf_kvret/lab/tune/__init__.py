"""``hf-kvret tune``: which method, store, budget and rest suit a model and a text of the user's."""
