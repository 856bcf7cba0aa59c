"""`python run.py test --hf MODEL`: measures a pretrained model of Hugging Face transformers, without Lightning."""

from pathlib import Path

from jsonargparse import Namespace

from kerple.base.run_folder import test_directory
from kerple.config.options import name_in_errors
from kerple.data.shard_options import ShardOptions
from kerple.measure.pretrained import measure_pretrained
from kerple.measure.pretrained_options import dump, parse_options, parser


@name_in_errors("hf")
def main(arguments: list[str]) -> None:
    """Measure a pretrained model and write the results.

    Args:
        arguments: Arguments after the command, including ``--hf MODEL``.

    Raises:
        UserError: If the model does not exist, or it does not support an option.
    """
    options = parse_options(arguments)
    from kerple.training.torch_settings import configure_torch  # wrong options are reported before slow imports

    configure_torch()
    objects = parser().instantiate_classes(options)
    directory = test_directory(options.output or str(_run_folder(options) / "test"), "", "test")
    data = ShardOptions(**options.data.as_dict())
    measure_pretrained(options.hf, objects.model, data, objects.trainer, directory, dump(options))
    print(f"written to {directory}")


def _run_folder(options: Namespace) -> Path:
    from kerple.hf.pretrained_files import model_name  # takes seconds

    model, label = options.model, model_name(options.hf)
    label += f"-{model.scaling}{model.factor or ''}" if model.scaling else ""
    label += f"-{model.position.class_path.rpartition('.')[2]}" if model.position else ""
    return Path(options.logs) / options.experiment / label
