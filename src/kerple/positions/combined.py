"""`Combined`: several strategies in one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn

from kerple.base.errors import UserError, require
from kerple.positions.base import Position, Shape, StrategyBuilder, joint_shift_invariance
from kerple.positions.cope import CoPE
from kerple.positions.kerple import KerpleLog
from kerple.positions.path import PaTH
from kerple.positions.pope import PoPE
from kerple.positions.randomized import RandomizedPositions
from kerple.positions.rotary import RoPE
from kerple.positions.self_extend import SelfExtend
from kerple.positions.shaw import Shaw
from kerple.positions.temperature import SSMax, Temperature
from kerple.positions.token_positions import (
    AttentionWeights,
    ModifiedScores,
    QueriesAndKeys,
    QueryKeyBlock,
    TokenPositions,
)
from kerple.positions.transformer_xl import TransformerXL
from kerple.positions.xpos import XPos

SINGLE_WIDTH = (CoPE, PaTH, PoPE, RoPE, SelfExtend, Shaw, TransformerXL, XPos)
"""Strategies that accept only queries and keys of the head dimension δ. `PoPE` and `SelfExtend` return them with 2δ."""

IN_TURN = ("key_bias", "query_bias", "modify_scores")
"""Hooks that are applied in the order of the parts if a part has `modify_scores`."""


class Combined(Position):
    """Combination of strategies: biases and additions to the output are summed, and factors of the scores are
    multiplied.

    `remap_positions`, `embed`, `transform_qk`, `modify_scores` and `transform_output` of the parts are applied in the
    order of the parts. The logits of several sinks are merged by their log-sum-exp.

    Parameters: `0`, and those of the parts. By default every part has one set per layer if any part does.
    Cost: that of the parts. If one part needs explicit scores (see `Position`), no part uses fused attention.

    Args:
        shape: Sizes of the model.
        parts: Functions that build the strategies from the shape.

    Raises:
        UserError: If there are no parts, or two parts exclude each other (`check_combination`,
            `check_drawn_positions`). In a forward pass, if a part returns `AttentionWeights`, and a later part modifies
            scores or any part has a sink.
    """

    def __init__(self, shape: Shape, parts: Sequence[StrategyBuilder] = (SSMax, KerpleLog)) -> None:
        super().__init__()
        self.parts = cast(Sequence[Position], nn.ModuleList(build(shape) for build in parts))
        check_combination(list(self.parts))
        if shape.layer == 0:  # the only layer whose strategy reads tables of positions, in `embed`
            check_drawn_positions(self.parts)
        self.shift_invariant = joint_shift_invariance(self.parts)
        self.prefix_consistent = all(part.prefix_consistent for part in self.parts)
        self.per_layer = any(part.per_layer for part in self.parts)
        self.varies_by_layer = any(part.varies_by_layer for part in self.parts)
        self.window = min((part.window for part in self.parts if part.window is not None), default=None)
        # the first one; `check_combination` refuses two parts of class `SelfExtend` if they rotate queries and keys
        self.neighbor_window = next(filter(None, (part.neighbor_window for part in self.parts)), None)
        self.test_only = any(part.test_only for part in self.parts)
        self.max_length = min((part.max_length for part in self.parts if part.max_length is not None), default=None)
        self._widths = [0] * len(self.parts)  # last dimension of the token_state of each part, 0 without a state

    def uses(self, hook: str) -> bool:
        # if a part modifies scores, biases of keys and queries are added at the turn of their parts
        in_turn = hook in ("key_bias", "query_bias") and self.uses("modify_scores")
        return any(part.uses(hook) for part in self.parts) and not in_turn

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        return reduce(lambda positions, part: part.remap_positions(positions, tokens), self.parts, positions)

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        return reduce(lambda x, part: part.embed(x, positions), self.parts, x)

    def bias(self, distance: Tensor) -> Tensor | None:
        return _reduce_present(torch.add, [part.bias(distance) for part in self.parts])

    def score_scale(self, distance: Tensor) -> Tensor | None:
        return _reduce_present(torch.mul, [part.score_scale(distance) for part in self.parts])

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        for part, part_state in self._with_states(state):
            q, k = part.transform_qk(q, k, part_state, positions)
        return q, k

    def sink_logit(self, q: Tensor, positions: TokenPositions) -> Tensor | None:
        return _reduce_present(torch.logaddexp, [_expand_sink(part.sink_logit(q, positions), q) for part in self.parts])

    def transform_output(self, out: Tensor, x: Tensor) -> Tensor:
        return reduce(lambda out, part: part.transform_output(out, x), self.parts, out)

    def token_state(self, x: Tensor, positions: TokenPositions, past: Tensor | None) -> Tensor | None:
        states = [part.token_state(x, positions, past_state) for part, past_state in self._with_states(past)]
        self._widths = [0 if state is None else state.shape[-1] for state in states]
        present = [state for state in states if state is not None]
        if not present:
            return None
        heads = max(state.shape[1] for state in present)
        return torch.cat([state.expand(-1, heads, -1, -1) for state in present], -1)  # (B, H, T, Σ c)

    def key_bias(self, state: Tensor | None) -> Tensor | None:
        if not self.uses("key_bias"):
            return None
        return _reduce_present(torch.add, [part.key_bias(part_state) for part, part_state in self._with_states(state)])

    def query_bias(self, q: Tensor, state: Tensor | None, positions: TokenPositions) -> tuple[Tensor, Tensor] | None:
        if not self.uses("query_bias"):
            return None
        biases = [part.query_bias(q, part_state, positions) for part, part_state in self._with_states(state)]
        features, curves = zip(*(bias for bias in biases if bias is not None), strict=True)
        return torch.cat(features, -1), torch.cat(_same_length([x.mT for x in curves]), -1).mT

    def value_bias(self) -> Tensor | None:
        vectors = [part.value_bias() for part in self.parts if part.uses("value_bias")]
        return torch.stack(_same_length([x for x in vectors if x is not None])).sum(0) if vectors else None

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> ModifiedScores:
        sinks: list[Tensor | None] = []
        result: Tensor | AttentionWeights = s
        for part, state in self._with_states(block.state):
            if any(map(part.uses, IN_TURN)):
                if isinstance(result, AttentionWeights):
                    given = f"{type(part).__name__} after a strategy that replaces the softmax, such as StickBreaking"
                    raise UserError(f"Combined: parts: got {given}; change their order, or leave one out")
                own_block = replace(block, state=state)
                # the joint state may be fp64 because of one part, and gives the biases of the others this dtype too
                scores = part.add_token_biases(result.masked_fill(~block.seen, 0), q, own_block).to(s.dtype)
                modified = part.modify_scores(scores, q, k, own_block) if part.uses("modify_scores") else scores
                result, sink = modified if isinstance(modified, tuple) else (modified, None)
                result = result.to(s.dtype) if isinstance(result, Tensor) else result
                sinks.append(sink)
        sink = _reduce_present(torch.logaddexp, sinks)
        if isinstance(result, Tensor):
            return result if sink is None else (result, sink)
        if sink is not None or self.uses("sink_logit"):
            given = "a sink and a strategy that replaces the softmax, such as StickBreaking"
            raise UserError(f"Combined: parts: got {given}; leave one out")
        return result

    def add_to_output(self, p: Tensor, v: Tensor, block: QueryKeyBlock) -> Tensor:
        users = [(part, state) for part, state in self._with_states(block.state) if part.uses("add_to_output")]
        terms = [part.add_to_output(p, v, replace(block, state=state)) for part, state in users]
        return torch.stack(terms).sum(0)  # (B, H, Tq, δ)

    def _with_states(self, state: Tensor | None) -> Iterator[tuple[Position, Tensor | None]]:
        """Yield each part with its section of the joint state, which is None if the part has no state."""
        sections = [None] * len(self.parts) if state is None else state.split(self._widths, -1)
        for part, section, width in zip(self.parts, sections, self._widths, strict=True):
            yield part, section if width else None


def _reduce_present(operation: Callable[[Tensor, Tensor], Tensor], tensors: list[Tensor | None]) -> Tensor | None:
    """Reduce all tensors that are not None by an operation of two tensors; return None if all are None."""
    present = [x for x in tensors if x is not None]
    return reduce(operation, present) if present else None


def _same_length(tensors: list[Tensor]) -> list[Tensor]:
    """Repeat the last row of tensors (rows, width), so that all have the same number of rows."""
    rows = max(len(x) for x in tensors)
    return [torch.cat([x, x[-1:].expand(rows - len(x), -1)]) for x in tensors]


def _expand_sink(sink: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand a sink (H,) to all queries, (B, H, T). Return None and a sink (B, H, T) unchanged."""
    return sink[:, None].expand(q.shape[:3]) if sink is not None and sink.ndim == 1 else sink


def check_combination(parts: Sequence[Position]) -> None:
    """Raise a UserError if there are no strategies, or if two of them exclude each other.

    `PaTH` computes new scores from queries and keys. The bias and the score scale of any other part would be lost, and
    so would scores that a part before `PaTH` modified. `PoPE` and `SelfExtend` double the width of queries and keys,
    which `SINGLE_WIDTH` strategies do not accept. `SSMax` and `Temperature` multiply the queries by a factor. Before
    `PoPE`, which applies softplus to the queries, the scores would not be multiplied by this factor.
    """
    require(bool(parts), "Combined: parts", "none", "at least one strategy")
    for i, part in enumerate(parts):
        if _contains(part, PaTH):
            by_distance = [other for other in parts if other.uses("bias") or other.uses("score_scale")]
            _refuse(by_distance, "with PaTH, which replaces the scores; leave one out")
            earlier = [other for other in parts[:i] if any(map(other.uses, IN_TURN))]
            _refuse(earlier, "before PaTH, which replaces the scores; put PaTH first")
        if _contains(part, PoPE):
            with_factor = [other for other in parts[:i] if _contains(other, SSMax, Temperature)]
            _refuse(with_factor, "before PoPE, which would not multiply the scores by its factor; put PoPE first")
        if _contains(part, PoPE) or part.neighbor_window is not None:
            name = "PoPE" if _contains(part, PoPE) else type(part).__name__
            single_width = [other for other in parts if other is not part and _contains(other, *SINGLE_WIDTH)]
            _refuse(single_width, f"with {name}, which doubles the width of queries and keys; leave one out")


def check_drawn_positions(parts: Sequence[Position]) -> None:
    """Raise a UserError if `RandomizedPositions` draws positions that another strategy cannot represent."""
    inner = [module for part in parts for module in part.modules() if isinstance(module, Position)]
    drawn = [position for position in inner if isinstance(position, RandomizedPositions)]
    if drawn:
        last = len(drawn[-1].fixed) - 1  # later draws replace earlier ones
        for position in reversed(inner):  # a wrapped strategy before its wrapper, which has the same limit
            limit = position.max_length
            if limit is not None and limit <= last and not _contains(position, RandomizedPositions):
                reason = f"with positions up to {limit - 1}, and RandomizedPositions, which draws up to {last}"
                _refuse([position], f"{reason}; wrap the combination: RandomizedPositions(Combined)")


def _contains(part: Position, *kinds: type[Position]) -> bool:
    """Whether a strategy, or a strategy inside it, is an instance of one of these classes."""
    return any(isinstance(inner, kinds) for inner in part.modules())


def _refuse(parts: Sequence[Position], reason: str) -> None:
    """Raise a UserError for the first of these parts, if there are any."""
    if parts:
        raise UserError(f"Combined: parts: got {type(parts[0]).__name__} {reason}")
