"""Training: the LightningModule, optimisers, and callbacks that monitor and save a run."""
