"""`python run.py prepare --config …`: build the shards a data config asks for, nothing else."""

from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule

from kerple.data.datamodule import TokenShards
from kerple.data.inspect import show


def main(arguments: list[str]) -> None:
    """Build what is missing and print what is there.

    Args:
        arguments: Of the command line. A config may be of `data` alone or a whole run's, of which only `data` is used.
    """
    parser = ArgumentParser(prog="run.py prepare", description=__doc__)
    parser.add_argument("--config", action="config", help="a config with a `data` section; others may follow and win")
    parser.add_subclass_arguments(
        LightningDataModule, "data", default={"class_path": "kerple.data.datamodule.TokenShards"}
    )
    # a whole run's config has these too; they are no concern of the data
    for section in ("model", "trainer", "seed_everything", "experiment", "logs", "run_dir", "ckpt_path", "trust"):
        parser.add_argument(f"--{section}", type=object, default=None, help="ignored")
    config = parser.parse_args(arguments)
    prepare(parser.instantiate_classes(config).data)


def prepare(data: TokenShards) -> None:
    """Build the shards of a datamodule and print a summary of them."""
    data.prepare_data()
    data.setup()
    show(data.manifest)
