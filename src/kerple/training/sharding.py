"""`ShardedBlocks`: FSDP with the linear layers of blocks in the Trainer's precision, and other parameters in fp32."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from kerple.base.errors import require
from kerple.model import Transformer

# dtype in which the linear layers of blocks are gathered, by the Trainer's precision
LINEAR_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedBlocks(ModelParallelStrategy):
    """Shards parameters, gradients and optimiser moments by torch's `fully_shard`.

    The linear layers of each block are one unit of `fully_shard`, which is gathered in the Trainer's precision. All
    other parameters, such as those of strategies and norms, are another unit, which is gathered in fp32. Buffers keep
    their dtype, gradients are summed in fp32, and the inputs of blocks are not cast. A checkpoint is one file, as
    without sharding.

    Args:
        reshard_after_forward: Whether the weights of a block are freed between its forward and its backward pass. They
            are then gathered twice a step.
        **options: Options of `ModelParallelStrategy`, except save_distributed_checkpoint.
    """

    def __init__(self, reshard_after_forward: bool = True, **options: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **options)
        self.reshard_after_forward = reshard_after_forward

    def shard(self, network: Transformer) -> None:
        """Replace each parameter by a sharded `DTensor`. In the forward and backward pass, parameters are whole.

        Raises:
            UserError: If the Trainer's precision is not one of `LINEAR_DTYPES`.
        """
        if isinstance(network, FSDPModule):  # a second fit, validation or test by the same trainer
            return
        # all processes in one dimension, unlike the mesh of Lightning
        mesh = torch.distributed.init_device_mesh(self.root_device.type, (self.world_size,))
        precision = self.precision_plugin.precision
        expected = f"{', '.join(LINEAR_DTYPES)} or auto"
        given = f"{precision} with the strategy ShardedBlocks"
        require(precision in LINEAR_DTYPES, "trainer.precision", given, expected)
        policy = MixedPrecisionPolicy(LINEAR_DTYPES[precision], torch.float32, cast_forward_inputs=False)
        for block in network.blocks:
            layers: list[nn.Module] = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
            fully_shard(layers, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        fully_shard(network, mesh=mesh)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # the view is not changed in place
        register_fsdp_forward_method(network, "losses")  # training calls it in place of `forward`


def full_tensor(x: Tensor) -> Tensor:
    """Gather a tensor from all processes if it is sharded. Return other tensors unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the part of each tensor that is on this process, without empty parts."""
    return [x for x in (x.to_local() if isinstance(x, DTensor) else x for x in tensors) if x.numel()]
