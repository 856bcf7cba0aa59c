"""`ShardedBlocks`: FSDP that gathers the matrices of blocks in the Trainer's precision, and all else in fp32."""

from dataclasses import replace
from typing import Any

import torch
from pytorch_lightning.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy

from kerple.model.block import Block


class ShardedBlocks(FSDPStrategy):
    """Parameters, gradients and moments in shards (FSDP): a unit for each attention and MLP, and one for all else.

    Lightning's `FSDPStrategy` casts all parameters and buffers to bf16 under ``bf16-mixed``, and so the slopes, tables
    and angles of positional strategies. Here the linear layers of a block are gathered in the Trainer's precision, and
    everything else, such as strategies and norms, in fp32. Buffers keep their dtype, gradients are summed in fp32, and
    what a strategy hands to the blocks is not cast.

    Args:
        **options: Options of `FSDPStrategy`, except mixed_precision and auto_wrap_policy.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(mixed_precision=MixedPrecision(), **options)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        of_layers = replace(
            self.precision_plugin.mixed_precision_config,
            reduce_dtype=torch.float32, buffer_dtype=None, cast_forward_inputs=False,
        )  # fmt: skip
        units = {part for block in model.modules() if isinstance(block, Block) for part in (block.attention, block.mlp)}
        self.kwargs["auto_wrap_policy"] = CustomPolicy(lambda m: m in units and {"mixed_precision": of_layers})
        return super()._setup_model(model)
