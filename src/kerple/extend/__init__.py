"""Extension of the context of a pretrained model without training: the methods, their search and its result."""
