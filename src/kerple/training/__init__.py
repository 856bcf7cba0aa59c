"""Training with Lightning: the module, the Trainer, an optimiser, and callbacks that monitor and save a run."""
