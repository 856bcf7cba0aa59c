"""Estimate of the memory that a model of transformers needs, and its comparison with the free memory."""

from typing import Any

import psutil
import torch

from kerple.base.errors import UserError
from kerple.hf.foreign_errors import foreign_errors


def check_memory(config: Any, tokens: int = 0, device: str = "cpu", trust_remote_code: bool = False) -> None:
    """Check that the weights of a model and the activations of one layer, all in fp32, fit into the free memory.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        tokens: Length of the input; 0 to check only the weights. A length above 0 is the option ``length`` of the
            command `extend`, and the error names this option.
        device: Type of the device whose memory is compared, ``cpu`` or ``cuda``.
        trust_remote_code: Whether code that is stored with the model may run.

    Raises:
        UserError: If the estimate is larger than the free memory.
    """
    from transformers import AutoModelForCausalLM  # an optional package

    name = config.model_type
    with foreign_errors(f"model: its configuration gives no {name} model", "correct config.json"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    # activations of a layer for one token: about 16 vectors of the model's width, and 3 of the MLP's width
    sizes = getattr(text, "intermediate_size", None) or 4 * text.hidden_size  # Gemma 3n has one for each layer
    width = 16 * text.hidden_size + 3 * (max(sizes) if isinstance(sizes, list) else sizes)
    needed = 4 * (sum(p.numel() for p in model.parameters()) + tokens * width)  # bytes
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if needed > free:
        given, advice = "model: the weights need", "use a machine with more memory, or a smaller model"
        if tokens:
            given, advice = f"length: got {tokens} tokens, which need", "give a smaller number"
        needed, free = (f"{size / 2**30:.1f} GiB" for size in (needed, free))
        raise UserError(f"{given} about {needed} of memory in fp32, but only {free} are free; {advice}")
