"""What runs once a call of ``generate``, and what a model that is switched gets."""
