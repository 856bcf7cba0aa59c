# Written by docs/stubs.py; make format writes it again.
# ruff: noqa
# fmt: off

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import walk_packages
from typing import Any
from kerple.base.errors import unknown
from kerple.positions.base import Position, Shape, StrategyBuilder
from kerple.positions.token_positions import AttentionWeights, QueryKeyBlock, TokenPositions
from kerple.positions.alibi_and_sandwich import ALiBi
from kerple.positions.position_coupling import Abacus
from kerple.positions.cope import CoPE
from kerple.positions.combined import Combined
from kerple.positions.position_coupling import Coupled
from kerple.positions.dape import DAPE
from kerple.positions.dape import DAPEv2
from kerple.positions.fire import FIRE
from kerple.positions.fox import FoX
from kerple.positions.kernel_sum import KernelSum
from kerple.positions.kerple import KerpleBias2
from kerple.positions.kerple import KerpleBias3
from kerple.positions.kerple import KerpleBiasWeight
from kerple.positions.kerple import KerpleLog
from kerple.positions.kerple import KerpleLog3
from kerple.positions.kerple import KerplePower
from kerple.positions.kerple import KerpleWeight1
from kerple.positions.kerple import KerpleWeight2
from kerple.positions.layer_pattern import LayerPattern
from kerple.positions.absolute import Learned
from kerple.positions.query_dependent_bias import LearnedRelativeBias
from kerple.positions.absolute import NoPE
from kerple.positions.output_gate import OutputGate
from kerple.positions.path import PaTH
from kerple.positions.pope import PoPE
from kerple.positions.randomized import RandomizedPositions
from kerple.positions.self_extend import ReRoPE
from kerple.positions.rotary import RoPE
from kerple.positions.temperature import SSMax
from kerple.positions.alibi_and_sandwich import Sandwich
from kerple.positions.self_extend import SelfExtend
from kerple.positions.shaw import Shaw
from kerple.positions.sink import Sink
from kerple.positions.absolute import Sinusoidal
from kerple.positions.stick_breaking import StickBreaking
from kerple.positions.t5 import T5
from kerple.positions.temperature import Temperature
from kerple.positions.transformer_xl import TransformerXL
from kerple.positions.xpos import XPos

__all__ = ['AttentionWeights', 'Position', 'QueryKeyBlock', 'Shape', 'StrategyBuilder', 'TokenPositions', 'build', 'names', 'strategies', 'ALiBi', 'Abacus', 'CoPE', 'Combined', 'Coupled', 'DAPE', 'DAPEv2', 'FIRE', 'FoX', 'KernelSum', 'KerpleBias2', 'KerpleBias3', 'KerpleBiasWeight', 'KerpleLog', 'KerpleLog3', 'KerplePower', 'KerpleWeight1', 'KerpleWeight2', 'LayerPattern', 'Learned', 'LearnedRelativeBias', 'NoPE', 'OutputGate', 'PaTH', 'PoPE', 'RandomizedPositions', 'ReRoPE', 'RoPE', 'SSMax', 'Sandwich', 'SelfExtend', 'Shaw', 'Sink', 'Sinusoidal', 'StickBreaking', 'T5', 'Temperature', 'TransformerXL', 'XPos']

def names() -> list[str]:
    ...
def strategies() -> dict[str, type[Position]]:
    ...
def build(name: str, *, dim: int, heads: int, length: int, **options: Any) -> Position:
    ...
