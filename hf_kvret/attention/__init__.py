"""What runs once a layer: the attention function, its masks, and the model's own attention."""
