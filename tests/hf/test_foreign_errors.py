"""Errors of foreign code become one line, errors of this project do not; checks of foreign configurations."""

import errno
import json

import pytest
import torch

from kerple.base.errors import UserError
from kerple.hf.configuration_check import check_configuration
from kerple.hf.foreign_errors import foreign_errors
from kerple.hf.memory import check_memory
from kerple.hf.pretrained_files import find_model, read_model, read_model_config
from kerple.hf.rope import read_rope
from kerple.probe.capture import captured
from tests.hf.tiny import configuration, hf, text, tiny

from kerple.hf import retrofit  # isort: skip  # needs transformers, which tests.hf.tiny looks for


def call(function, *arguments):
    with foreign_errors("model: it failed", "use another model"):
        return function(*arguments)


def test_only_errors_of_foreign_code_become_user_errors():
    assert call(json.loads, "3") == 3
    for function, argument, reason in (
        (json.loads, "{", "JSONDecodeError: Expecting property name.*"),
        (torch.zeros(3).view, 2, r"RuntimeError: shape .*"),
        ([].__getitem__, 1, "IndexError: list index out of range"),
    ):
        with pytest.raises(UserError, match=rf"^model: it failed \(.*{reason}\); use another model$"):
            call(function, argument)

    def broken(error):
        raise error

    for error in (UserError("x"), MemoryError(), torch.OutOfMemoryError(), OSError(errno.ENOSPC, "full")):
        with pytest.raises(type(error)) as raised:
            call(broken, error)
        assert raised.value is error
    with pytest.raises(KeyError, match="rope_theta"):
        call(read_rope, {}, False, 0)  # a function of this project


ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**30}, "for num_hidden_layers in config.json, expected a whole number of 1 or more"),
        ({"num_key_value_heads": 0}, "got 0 for num_key_value_heads"),
        ({"max_position_embeddings": -1}, "got -1 for max_position_embeddings"),
        ({"sliding_window": 2.5}, "got 2.5 for sliding_window"),
        ({"layer_types": ["full_attention"]}, "for layer_types in config.json, expected an entry for each of 2 layers"),
        ({"rope_parameters": ROPE | {"factor": float("nan")}}, "got nan for rope_parameters.factor"),
        ({"rope_parameters": ROPE | {"rope_theta": "x"}}, "got 'x' for rope_parameters.rope_theta"),
        ({"rope_parameters": {"full_attention": ROPE | {"factor": 0}}}, "got 0 for rope_parameters.factor"),
        ({"rope_parameters": ROPE | {"long_factor": [1.0, None]}}, "got None for rope_parameters.long_factor"),
        ({"n_head": 0}, r"got 0 for n_head in config\.json"),  # its name in the file of GPT-2
    ],
)
def test_values_of_a_configuration_that_are_out_of_range(changes, message):
    config = hf.GPT2Config() if "n_head" in changes else configuration("llama")
    check_configuration(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=f"^model: .*{message}.*; correct the file$"):
        check_configuration(config)


def test_a_window_that_is_not_used_may_be_0():
    config = hf.Qwen2MoeConfig(use_sliding_window=False)  # transformers sets the window to 0
    assert config.sliding_window == 0
    check_configuration(config)
    config.use_sliding_window = True
    with pytest.raises(UserError, match="got 0 for sliding_window"):
        check_configuration(config)


def test_sizes_that_differ_between_layers():
    layers = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    config = hf.Gemma4TextConfig(**layers, head_dim=8, global_head_dim=16)
    assert [layer.head_dim for layer in config.per_layer_config] == [8, 16]
    check_configuration(config)
    config = hf.Gemma4TextConfig(**layers, head_dim=8, global_head_dim=0)
    with pytest.raises(UserError, match=r"got 0 for head_dim in .*, expected a whole number of 1 or more"):
        check_configuration(config)


@pytest.mark.parametrize("weights", ["adapter_model.bin", "own.safetensors.index.json", "own.safetensors"])
@pytest.mark.parametrize("strategy", [None, "KerpleLog"])
def test_pickles_that_a_configuration_names_as_weights_are_refused(tmp_path, weights, strategy):
    model = tiny("llama")
    state = (retrofit(model, strategy) if strategy else model).state_dict()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "own.safetensors")
    torch.save(state, tmp_path / "adapter_model.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "adapter_model.bin")}
    (tmp_path / "own.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((tmp_path / "config.json").read_text())
    (config["model"] if strategy else config)["transformers_weights"] = weights
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = find_model(str(tmp_path))
    if weights == "own.safetensors":
        assert read_model(source, read_model_config(source)).state_dict().keys() >= state.keys()
    else:
        with pytest.raises(UserError, match="are pickled, and reading a pickle can run any code"):
            read_model(source, read_model_config(source))


def test_memory_of_a_model_with_a_size_for_each_layer():
    config = hf.FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    config.intermediate_size = [48, 64]
    check_memory(config, tokens=8)


@torch.inference_mode()
def test_attention_is_captured_in_layers_without_an_index():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.layer_idx = None
    with captured(model, set()) as calls:
        for length in (9, 3):
            model(text(1, length), use_cache=False)
    assert [call.layer for call in calls] == [0, 1, 0, 1]
