"""What a retrieval layer is made of: window, index, store, and what they share."""
