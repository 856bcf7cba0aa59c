"""`extend`: the choice of a method by which a model reads inputs longer than those of its training."""
