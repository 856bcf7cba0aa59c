"""Training: the LightningModule, its optimiser, and callbacks that watch and save a run."""
