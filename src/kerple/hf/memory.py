"""An estimate of the memory that a model of transformers needs, and its comparison with the free memory."""

from typing import Any

import psutil
import torch

from kerple.base.errors import UserError


def check_memory(config: Any, tokens: int = 0, device: str = "cpu", trust_remote_code: bool = False) -> None:
    """Check that the weights of a model and the activations of one layer fit into the free memory in fp32.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        tokens: Length of the input, which is the option ``to`` of `extend`; 0 for the weights only.
        device: Type of the device, ``cpu`` or ``cuda``.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        UserError: If the free memory is smaller.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    width = 16 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    needed = 4 * (sum(p.numel() for p in model.parameters()) + tokens * width)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if needed > free:
        given, advice = "model: got one that needs", "use a machine with more memory, or a smaller model"
        if tokens:
            given, advice = f"to: got {tokens} tokens, which need", "give a smaller number"
        needed, free = (f"{size / 2**30:.1f} GiB" for size in (needed, free))
        raise UserError(f"{given} about {needed} of memory in fp32, and {free} are free; {advice}")
