"""`ShardedBlocks`: FSDP with the linear layers of blocks in the Trainer's precision, and other parameters in fp32."""

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

# dtype in which the linear layers of blocks are gathered, by the Trainer's precision
GATHERED = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedBlocks(ModelParallelStrategy):
    """Shards parameters, gradients and moments by torch's `fully_shard`: a unit for each block, and one for the rest.

    The linear layers of a block are gathered in the Trainer's precision. Other parameters, such as those of strategies
    and norms, are gathered in fp32. Buffers keep their dtype, gradients are summed in fp32, and the inputs of blocks
    are not cast. A checkpoint is one file, as without shards.

    Args:
        reshard_after_forward: Whether the weights of a block are freed between its forward and its backward pass, and
            gathered twice a step.
        **options: Options of `ModelParallelStrategy`, except save_distributed_checkpoint.
    """

    def __init__(self, reshard_after_forward: bool = True, **options: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **options)
        self.reshard_after_forward = reshard_after_forward

    def shard(self, network: Transformer) -> None:
        """Replace each parameter by a sharded `DTensor`. In the forward and backward pass, parameters are whole.

        Raises:
            UserError: If the Trainer's precision is not one of `GATHERED`.
        """
        if isinstance(network, FSDPModule):  # a second fit, validation or test by the same trainer
            return
        # all processes in one dimension, unlike the mesh of Lightning
        mesh = torch.distributed.init_device_mesh(self.root_device.type, (self.world_size,))
        precision = self.precision_plugin.precision
        if precision not in GATHERED:
            expected = f"{', '.join(GATHERED)} or auto"
            raise UserError(f"trainer.precision: got {precision} with the strategy ShardedBlocks, expected {expected}")
        policy = MixedPrecisionPolicy(GATHERED[precision], torch.float32, cast_forward_inputs=False)
        for block in network.blocks:
            layers: list[nn.Module] = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
            fully_shard(layers, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        fully_shard(network, mesh=mesh)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # the view is not changed in place
        register_fsdp_forward_method(network, "losses")  # training calls it in place of `forward`


def whole(x: Tensor) -> Tensor:
    """A tensor, gathered from all processes if it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of tensors that are on this process, without empty ones."""
    return [x for x in (x.to_local() if isinstance(x, DTensor) else x for x in tensors) if x.numel()]
