"""The 135M model that a package carries: read from GGUF, imported, the same logits and losses."""

import pytest
import torch

from kerple.hf.adapter import HuggingFaceNetwork
from kerple.hf.families import read_family
from kerple.hf.source import locate, read_config, read_model, read_tokenizer
from kerple.hf.weights import fill, transformer

pytestmark = pytest.mark.slow


@torch.inference_mode()
def test_our_import_reads_text_as_transformers_does() -> None:
    source = locate("smollm2-135m")
    model = read_model(source, read_config(source))
    theirs = HuggingFaceNetwork(model)
    assert (theirs.shape.length, theirs.strategy, theirs.in_pieces) == (8192, "RoPE", True)
    read = read_family(model.config, model.state_dict())
    ours = transformer(read.model).eval()
    assert not fill(ours, read).new
    text = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n" * 6
    tokens = torch.tensor([read_tokenizer(source).encode(text, add_special_tokens=False).ids])
    expected = theirs(tokens)
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
    losses = ours.losses(tokens)
    torch.testing.assert_close(losses, theirs.losses(tokens), atol=1e-3, rtol=1e-3)
    assert float(losses[0, -100:].mean()) < 0.5  # what was written five times before is no surprise
    cache = ours.new_cache()
    parts = torch.cat([ours(part, cache=cache) for part in tokens.split(50, 1)], 1)
    torch.testing.assert_close(parts, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
