"""`KerpleForCausalLM` with optimisers of torch, and with caches, masks and positions of transformers."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kerple.base.errors import UserError
from kerple.hf.modeling import KerpleConfig, KerpleForCausalLM
from kerple.hf.position_limit import decoder_layers
from tests.hf.tiny import VOCABULARY, arguments, hf, text, tiny

from kerple.hf import from_pretrained as read_retrofitted, retrofit  # isort: skip  # tests.hf.tiny looks for transformers


def random_kerple(position: Any = "KerpleLog") -> KerpleForCausalLM:
    torch.manual_seed(0)
    network = {"dim": 16, "heads": 2, "length": 12, "layers": 2, "vocabulary": VOCABULARY, "position": position}
    return KerpleForCausalLM(KerpleConfig(network | {"init": 0.3})).eval()


def test_a_step_of_an_optimiser_clamps_the_parameters_of_its_model_only(tmp_path):
    made, other = random_kerple().train(), random_kerple().train().network.positions[0].r2
    made.save_pretrained(tmp_path)
    for model in (made, deepcopy(made), hf.AutoModelForCausalLM.from_pretrained(tmp_path).train()):
        rate = model.network.positions[0].r2
        with torch.no_grad():
            rate.fill_(-0.04)
            other.fill_(-0.04)
        model(text(1, 12), labels=text(1, 12)).loss.backward()
        torch.optim.Adagrad(model.parameters(), lr=1e-6).step()
        assert float(rate.detach().min()) > 0
        assert float(other.detach().max()) < 0


def test_random_positions_are_drawn_once_per_step(tmp_path):
    model = random_kerple("RandomizedPositions").train()
    position = model.network.positions[0]
    before, rows = position.drawn.clone(), [{"input_ids": row, "labels": row} for row in text(12, 12)]
    model(text(2, 12), labels=text(2, 12)).loss.backward()
    model.eval()(text(2, 12))
    assert torch.equal(position.drawn, before)
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    hf.Trainer(model, arguments(tmp_path, **options), train_dataset=rows).train()
    assert int(position.step) == 3
    assert not torch.equal(position.drawn, before)


def test_integers_of_a_strategy_stay_integers_in_a_model_of_half_precision(tmp_path):
    for model in (random_kerple("RandomizedPositions"), retrofit(tiny("llama"), "RandomizedPositions")):
        model.save_pretrained(tmp_path)
        read = read_retrofitted if hasattr(model, "model") else hf.AutoModelForCausalLM.from_pretrained
        buffers = dict(read(tmp_path, dtype=torch.bfloat16).named_buffers())
        expected = {name: b for name, b in model.named_buffers() if name.endswith(("step", "drawn"))}
        assert expected
        assert {name: buffers[name].dtype for name in expected} == dict.fromkeys(expected, torch.int64)


@pytest.mark.parametrize("position", ["Shaw", "KerpleLog"])  # Shaw has other parameters in each layer
def test_layers_are_the_blocks_of_our_network_and_not_its_strategies(position):
    model = random_kerple(position)
    assert decoder_layers(model) is model.network.blocks


@pytest.mark.parametrize("position", ["KerpleLog", "PaTH"])  # PaTH has a state of each token in the cache
@torch.inference_mode()
def test_generation_is_the_same_with_a_given_cache_and_with_beams(position):
    model, prompt = random_kerple(position), text(2, 9)
    cache = model(prompt[:, :5], use_cache=True).cache
    continued = model.generate(prompt, cache=cache, max_new_tokens=5, do_sample=False)
    assert cache.get_seq_length() == 13
    assert torch.equal(continued, model.generate(prompt, max_new_tokens=5, do_sample=False))
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(*(model.generate(prompt, use_cache=use_cache, **options) for use_cache in (True, False)))


def test_padding_is_accepted_only_on_the_right_and_without_a_cache():
    model, tokens = random_kerple(), text(2, 9)
    mask = torch.ones_like(tokens)
    mask[:, 7:] = 0
    for use_cache in (True, False):
        with pytest.raises(UserError, match="attention_mask: got padding"):
            model.generate(tokens, attention_mask=mask, max_new_tokens=1, use_cache=use_cache)
    with pytest.raises(UserError, match="attention_mask: got padding"):
        model(tokens, attention_mask=mask.flip(1))
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits[:, :7], model(tokens[:, :7]).logits)
    labels, losses = tokens.clone(), model.network.losses(tokens)  # losses (2, 8) of tokens 1 to 8
    labels[0, 4:] = -100  # these labels do not count
    torch.testing.assert_close(model(tokens, labels=labels).loss, torch.cat([losses[0, :3], losses[1]]).mean())


@torch.inference_mode()
def test_logits_to_keep_may_be_indices_and_only_our_cache_is_accepted():
    model, tokens = random_kerple(), text(2, 9)
    for keep in (torch.tensor([3]), torch.tensor([7, 0])):
        torch.testing.assert_close(model(tokens, logits_to_keep=keep).logits, model(tokens).logits[:, keep])
    for call in (model, partial(model.generate, max_new_tokens=2)):
        with pytest.raises(UserError, match=r"^cache: got a DynamicCache, expected the cache of an earlier output"):
            call(tokens, past_key_values=hf.DynamicCache())


@torch.inference_mode()
def test_a_file_of_weights_without_one_weight_is_refused(tmp_path):
    random_kerple().save_pretrained(tmp_path)
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"] == set()
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "blocks" in name)
    save_file(
        {key: value for key, value in weights.items() if key != name}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserError, match=name):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_position_ids_must_continue_the_cache():
    model, tokens = random_kerple(), text(1, 6)
    with pytest.raises(UserError, match="position_ids: expected consecutive numbers from 0"):
        model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    cache = model(tokens[:, :4], use_cache=True, position_ids=torch.arange(4)[None]).cache
    logits = model(tokens[:, 4:], cache=cache, position_ids=torch.tensor([[4, 5]])).logits
    torch.testing.assert_close(logits, model(tokens).logits[:, 4:])
