"""Commands for those who use a model, beside the laboratory, whose models they load."""
