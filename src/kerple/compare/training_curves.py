"""Losses and speed during the training of a run, from the events that its TensorBoard logger wrote."""

from pathlib import Path

import pandas as pd

TABLE = "training"  # name of the table in the folder of a test
TAGS = {"train/loss": "train_loss", "val/loss": "val_loss", "train/tokens_per_second": "tokens_per_second"}


def training_curves(folder: Path) -> pd.DataFrame | None:
    """Return the columns step, train_loss, val_loss and tokens_per_second, as far as the run logged them.

    The values of a resumed run after its last checkpoint replace those of the stopped process.

    Args:
        folder: Folder of the run.

    Returns:
        A row for each step with a value; None if there are no events of losses or speed.
    """
    if not any(folder.glob("events.out.tfevents.*")):
        return None
    # imported here, because the import takes a second, and option errors are reported before it
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0: all values are read; of images and histograms, which may be large, only one is kept
    events = EventAccumulator(str(folder), {"scalars": 0, "images": 1, "histograms": 1}).Reload()
    logged = {tag: events.Scalars(tag) for tag in TAGS if tag in events.Tags()["scalars"]}
    # by time, because names of files that were begun in the same second are in another order
    series = {
        TAGS[tag]: pd.Series({event.step: event.value for event in sorted(found, key=lambda event: event.wall_time)})
        for tag, found in logged.items()
    }
    return pd.DataFrame(series).rename_axis("step").reset_index() if series else None
