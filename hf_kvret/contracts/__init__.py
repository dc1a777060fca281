"""What an index, a store and a state are, and what is passed between them."""
