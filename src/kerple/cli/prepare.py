"""`python run.py prepare --config …`: prepares the token shards of a configuration without training."""

from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kerple.base.errors import UserError
from kerple.base.ray_cluster import Cluster
from kerple.cli.inspect_shards import show
from kerple.config.files import read_mapping
from kerple.config.options import add_engine_arguments, command_parser, refuse_ray_options, split_options
from kerple.config.parsing import parse
from kerple.data.prepare.build import prepare
from kerple.data.prepare.workers import tokenise_on_ray
from kerple.data.shard_options import ShardOptions
from kerple.data.shards import Folder

DATA = "TokenShards"


def main(arguments: list[str]) -> None:
    """Prepare missing shards, and print a summary.

    The options are those of `TokenShards`, with the names that they have in `fit`: ``--data.corpus`` or
    ``--data.init_args.corpus``.

    Args:
        arguments: Arguments of the command. Of a configuration, only the section `data` is used.

    Raises:
        UserError: If a configuration cannot be read or has no section `data`, its data is not `TokenShards`, or the
            shards cannot be prepared, or are missing from a prepared folder.
    """
    parser = command_parser("prepare", __doc__)
    parser.add_argument("-c", "--config", action="config", help="file with a section `data`; flags replace its values")
    parser.add_class_arguments(ShardOptions, "data")
    add_engine_arguments(parser)
    known, rest = split_options(arguments, "data", "data.class_path")
    sections = [_data_section(path) for path in known.config]
    class_paths = [path for path in (known.data, vars(known)["data.class_path"]) if path]
    for path in class_paths or [section.get("class_path", DATA) for section in sections]:
        if str(path).rpartition(".")[2] != DATA:
            raise UserError(f"data: got {path}, which has no shards to prepare; expected {DATA}")
    sections = [section.get("init_args", {} if "class_path" in section else section) for section in sections]
    configs = [f"--config={yaml.safe_dump({'data': section})}" for section in sections]
    rest = [argument.replace("--data.init_args.", "--data.", 1) for argument in rest]
    given = parser.instantiate_classes(parse(parser, [*configs, *rest]))
    refuse_ray_options("prepare", given)
    options = given.data
    if options.corpus is not None and given.engine == "ray":
        prepare(options, partial(tokenise_on_ray, Cluster("prepare: engine", given.address)))
    elif options.corpus is not None:
        prepare(options)
    folder = Folder(options.location, options.cache, options.cache_gb)
    folder.check_shard_sizes()
    show(folder)


def _data_section(path: str) -> dict[str, Any]:
    section = read_mapping(Path(path)).get("data")
    if not isinstance(section, dict):
        raise UserError(f"config: got {path}, expected a file with a section `data`, such as configs/demo.yaml")
    return section
