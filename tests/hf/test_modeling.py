"""The exported model under what transformers does with models: other optimisers, caches, masks and vocabularies."""

from typing import Any

import pytest
import torch

from kerple.base.errors import UserError
from kerple.hf.modeling import KerpleConfig, KerpleForCausalLM
from tests.hf.tiny import VOCABULARY, arguments, hf, text


def made(position: Any = "KerpleLog") -> KerpleForCausalLM:
    torch.manual_seed(0)
    network = {"dim": 16, "heads": 2, "length": 12, "layers": 2, "vocabulary": VOCABULARY, "position": position}
    return KerpleForCausalLM(KerpleConfig(network | {"init": 0.3})).eval()


def test_parameters_are_in_their_ranges_after_each_step_of_any_optimiser():
    model = made().train()
    rate, other = model.network.positions[0].r2, made().train().network.positions[0].r2
    with torch.no_grad():
        rate.fill_(-0.04)
        other.fill_(-0.04)
    model(text(1, 12), labels=text(1, 12)).loss.backward()
    torch.optim.Adagrad(model.parameters(), lr=1e-6).step()
    assert float(rate.detach().min()) > 0
    assert float(other.detach().max()) < 0  # of a model that this optimiser does not train


def test_positions_are_drawn_once_a_step_and_not_once_a_forward(tmp_path):
    model = made("RandomizedPositions").train()
    position = model.network.positions[0]
    before, rows = position.drawn.clone(), [{"input_ids": row, "labels": row} for row in text(12, 12)]
    model(text(2, 12), labels=text(2, 12)).loss.backward()
    model.eval()(text(2, 12))
    assert torch.equal(position.drawn, before)
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    hf.Trainer(model, arguments(tmp_path, **options), train_dataset=rows).train()
    assert int(position.step) == 3
    assert not torch.equal(position.drawn, before)


@torch.inference_mode()
def test_a_cache_that_is_given_is_used_and_beams_write_with_one_what_they_write_without():
    model, prompt = made(), text(2, 9)
    begun = model(prompt[:, :5], use_cache=True).past_key_values
    went_on = model.generate(prompt, past_key_values=begun, max_new_tokens=5, do_sample=False)
    assert begun.get_seq_length() == 13
    assert torch.equal(went_on, model.generate(prompt, max_new_tokens=5, do_sample=False))
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(*(model.generate(prompt, use_cache=use_cache, **options) for use_cache in (True, False)))


def test_padding_on_the_left_and_in_prompts_is_refused_and_on_the_right_changes_no_text_that_is_scored():
    model, tokens = made(), text(2, 9)
    seen = torch.ones_like(tokens)
    seen[:, 7:] = 0
    for use_cache in (True, False):
        with pytest.raises(UserError, match="attention_mask: got padding"):
            model.generate(tokens, attention_mask=seen, max_new_tokens=1, use_cache=use_cache)
    with pytest.raises(UserError, match="attention_mask: got padding"):
        model(tokens, attention_mask=seen.flip(1))
    torch.testing.assert_close(model(tokens, attention_mask=seen).logits[:, :7], model(tokens[:, :7]).logits)
    labels, losses = tokens.clone(), model.network.losses(tokens)  # losses (2, 8) of tokens 1 to 8
    labels[0, 4:] = -100  # is left out of the mean
    torch.testing.assert_close(model(tokens, labels=labels).loss, torch.cat([losses[0, :3], losses[1]]).mean())


@torch.inference_mode()
def test_positions_of_several_texts_in_one_row_are_refused():
    model, tokens = made(), text(1, 6)
    with pytest.raises(UserError, match="position_ids: expected consecutive numbers from 0"):
        model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    begun = model(tokens[:, :4], use_cache=True, position_ids=torch.arange(4)[None]).past_key_values
    ended = model(tokens[:, 4:], past_key_values=begun, position_ids=torch.tensor([[4, 5]])).logits
    torch.testing.assert_close(ended, model(tokens).logits[:, 4:])
