"""`ShardedBlocks`: FSDP that gathers the linear layers of blocks in the Trainer's precision, and all else in fp32."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from kerple.base.errors import UserError
from kerple.model import Transformer

GATHERED = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # by precision


class ShardedBlocks(ModelParallelStrategy):
    """Parameters, gradients and moments in shards (torch's `fully_shard`): a unit for each block, and one for all else.

    The linear layers of a block are gathered in the Trainer's precision, and everything else, such as strategies and
    norms, in fp32. Buffers keep their dtype, gradients are summed in fp32, and what a strategy hands to the blocks is
    not cast. A checkpoint is one file, as without shards.

    Args:
        reshard_after_forward: Whether a block's weights are given up between its forward and its backward pass, and
            gathered twice a step.
        **options: Options of `ModelParallelStrategy`, except save_distributed_checkpoint.
    """

    def __init__(self, reshard_after_forward: bool = True, **options: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **options)
        self.reshard_after_forward = reshard_after_forward

    def shard(self, network: Transformer) -> None:
        """Cut the parameters up, in place: each is a `DTensor` from then on, except in the forward and backward pass.

        Raises:
            UserError: If the Trainer's precision is none that has fp32 parameters.
        """
        if isinstance(network, FSDPModule):  # a second fit, validation or test by the same trainer
            return
        # of all processes, whatever mesh Lightning has made of nodes and devices
        mesh = torch.distributed.init_device_mesh(self.root_device.type, (self.world_size,))
        precision = self.precision_plugin.precision
        if precision not in GATHERED:
            raise UserError(f"trainer.precision: got {precision}, expected {', '.join(GATHERED)} or auto with shards")
        policy = MixedPrecisionPolicy(GATHERED[precision], torch.float32, cast_forward_inputs=False)
        for block in network.blocks:
            layers: list[nn.Module] = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
            fully_shard(layers, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        fully_shard(network, mesh=mesh)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing writes into the losses
        register_fsdp_forward_method(network, "losses")  # training calls it, and not `forward`


def whole(x: Tensor) -> Tensor:
    """A tensor that may be in shards, gathered from all processes."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of tensors that may be in shards; those of which it holds nothing are left out."""
    return [x for x in (x.to_local() if isinstance(x, DTensor) else x for x in tensors) if x.numel()]
