"""What transformers' models are like, and what differs between its versions."""
