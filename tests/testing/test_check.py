"""The public property suite: a correct strategy has all properties, and each property detects a wrong strategy."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention import cpu, cpu_forward, query_block_attention
from kerple.cli.main import main
from kerple.model import Transformer
from kerple.positions import (
    FIRE,
    Combined,
    CoPE,
    FoX,
    LayerPattern,
    LearnedRelativeBias,
    Position,
    QueryKeyBlock,
    RoPE,
    SelfExtend,
    Shape,
    Shaw,
    TokenPositions,
)
from kerple.positions.token_positions import QueriesAndKeys
from kerple.testing import (
    PROPERTIES,
    DoesNotApply,
    Property,
    Subject,
    check,
    forward_pass,
    fp32_computation,
    outcome,
    parameters,
)
from tests.pages import put

COUNTED = "The docstring states the number of parameters"


@pytest.fixture
def my_file(tmp_path: Path, monkeypatch) -> Path:
    return put("own-strategy.md", tmp_path / "my_file.py", monkeypatch)


@pytest.mark.usefixtures("my_file")
def test_a_strategy_from_another_file_has_all_properties() -> None:
    outcomes = check(importlib.import_module("my_file").Root, start=0.3)
    assert [o.name for o in outcomes] == list(PROPERTIES)
    assert all(o.holds for o in outcomes)
    lengths = {o.name: o.lengths for o in outcomes}
    assert lengths["Logits do not depend on later tokens"] == (30, 90, 300)
    assert lengths[COUNTED] == lengths["torch.compile does not change the logits"] == ()


def test_the_command_ends_with_status_1_if_a_property_does_not_hold(my_file: Path, monkeypatch, capsys) -> None:
    for module in ("cli.check_strategy", "testing"):  # one property is enough
        monkeypatch.setattr(f"kerple.{module}.PROPERTIES", {COUNTED: PROPERTIES[COUNTED]})
    main(["check", "--model.position", "my_file.Root", "--model.position.start", "0.3"])
    assert capsys.readouterr().out.startswith(f"holds           {COUNTED}\n")
    sys.modules.pop("my_file")
    my_file.write_text(my_file.read_text().replace("Parameters: `H`", "Parameters: `2 * H`"))
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["check", "--model.position", "my_file.Root"])


def test_an_error_of_a_strategy_is_the_failure_of_each_property_and_has_a_traceback_with_debug(
    my_file: Path, monkeypatch, capsys
) -> None:
    source = my_file.read_text().replace("return -self", "return 1 / 0 - self")
    my_file.write_text(source)
    line = 1 + source[: source.index("1 / 0")].count("\n")
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["check", "--model.position", "my_file.Root"])
    printed = capsys.readouterr()
    failures = [line for line in printed.out.splitlines() if line.startswith("FAILS")]
    assert printed.out.count(f": {my_file}:{line}: ZeroDivisionError: division by zero\n") == len(failures) > 10
    assert len(printed.out.splitlines()) == len(PROPERTIES)
    for module in ("cli.check_strategy", "testing"):
        monkeypatch.setattr(f"kerple.{module}.PROPERTIES", dict([*PROPERTIES.items()][:1]))
    with pytest.raises(ZeroDivisionError):
        main(["check", "--debug", "--model.position", "my_file.Root"])


def test_a_fast_check_reads_only_the_shortest_input_and_compiles_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Transformer, "compile", Mock(side_effect=AssertionError))
    main(["check", "--model.position", "NoPE", "--fast", "true"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROPERTIES)  # a summary in place of one property
    assert {line.partition(" (")[2] for line in lines if " tokens)" in line} == {"30 tokens)"}


@pytest.mark.parametrize("error", [SystemExit(0), RuntimeError("first\nsecond"), AssertionError()])
def test_a_strategy_that_cannot_be_built_is_one_error(error: BaseException, monkeypatch, capsys) -> None:
    monkeypatch.setattr("kerple.positions.NoPE.__init__", Mock(side_effect=error))
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["check", "--model.position", "NoPE"])
    assert len(capsys.readouterr().err.splitlines()) == 1


class Sketch(Position):
    """Correct strategy. Subclasses have one error each."""

    shift_invariant = True
    size: Callable[[Shape], tuple[int, ...]] | None = None  # of a parameter; None for no parameter

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if self.size is not None:
            self.parameter = nn.Parameter(torch.zeros(self.size(shape)))


def first_features(self: Position, x: Tensor, positions: Any, past: Tensor | None) -> Tensor:
    """Return a state of each token, (B, 4, T, 1): the first features of its hidden state."""
    return x[..., :4].float().mT[..., None]


def sketch(**members: Any) -> type[Position]:
    """Return a strategy with these hooks and other members."""
    return type("Sketched", (Sketch,), members)


class FarAway(Sketch):
    """Scores of pairs that are far apart read later queries of the block."""

    def __init__(self, shape: Shape, far: int = 32) -> None:
        super().__init__(shape)
        self.far = far

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        return torch.where(block.distance >= self.far, s + 0.01 * s.sum(-2, keepdim=True), s)


class Filled(Sketch):
    """Replaces NaN in a parameter by a number."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.learn("rate", shape.heads, 0.5, minimum=0.01)

    def clamp_(self) -> None:
        self.rate.data.nan_to_num_(0.01)


class Unlimited(Filled):
    """Does not keep a parameter in its range."""

    def bias(self, distance: Tensor) -> Tensor:
        return -self.rate[:, None] * distance

    def clamp_(self) -> None:
        pass


class Counting(Sketch):
    """Its scores depend on the number of earlier calls."""

    calls = 0

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        self.calls += 1
        return s * self.calls


class Kept(Sketch):
    """Keeps a factor of each query on itself, which the next layer replaces."""

    def token_state(self, x: Tensor, positions: Any, past: Tensor | None) -> None:
        self.factor = first_features(self, x, positions, past).sigmoid()

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        return s * self.factor[:, :, block.queries.rows]


class WarmUp(Sketch):
    """The number of its training passes, which its bias reads, is in no checkpoint."""

    passes = 0

    def bias(self, distance: Tensor) -> Tensor:
        self.passes += self.training
        return -distance.expand(4, -1) * self.passes / 1000


class Stale(Sketch):
    """Keeps its first table of each length, and uses it in evaluation after its parameter has changed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.rate, self.tables = nn.Parameter(torch.ones(shape.heads)), {}

    def bias(self, distance: Tensor) -> Tensor:
        table = -self.rate[:, None] * distance
        return table if self.training else self.tables.setdefault(len(distance), table)


class Narrow(Sketch):
    """Changes only the first D / H dimensions of keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.width = shape.dim // shape.heads

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        waves = (positions.ids / 10).cos()[:, None]
        return q, torch.cat([k[..., : self.width] * waves, k[..., self.width :]], -1)


class Attribute(Sketch):
    """Keeps a tensor of the training length, which is neither a parameter nor a buffer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.all = torch.arange(shape.length)


class AttributeOfList(Sketch):
    """Keeps a tensor in a list."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.all = [torch.ones(shape.heads)]


class Valued(Sketch):
    """Reads the values of a tensor when it is built."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.slopes = torch.logspace(0, -1, shape.heads).tolist()


# correct only in the first block of queries of the default size
SecondBlock = sketch(modify_scores=lambda self, s, q, k, block: s * 1.5 if block.queries.rows[0] >= 128 else s)
# ignores the running sum in a cache
Cached = sketch(
    token_state=lambda self, x, positions, past: x[..., 0].cumsum(-1)[:, None, :, None].expand(-1, 4, -1, -1),
    modify_scores=lambda self, s, q, k, block: s + block.state.mT,
)
# the second sequence of a batch reads the first
SecondSequence = sketch(modify_scores=lambda self, s, q, k, block: torch.cat([s[:1], s[1:] + 0.1 * s[:-1]]))
# scores depend on the position of the query from the 65th token on
After64 = sketch(
    modify_scores=lambda self, s, q, k, block: torch.where(
        block.queries.rows[:, None] >= 64, s * (1 + block.queries.ids[:, None] / 300), s
    )
)
# the same, with as many positions as parameters, which is the training length
LimitedAfter64 = sketch(
    modify_scores=After64.modify_scores,
    size=lambda self, shape: (shape.length,),
    max_length=property(lambda self: len(self.parameter)),
)
# adds the scores of the previous key, also if it is outside the window or the block
Neighbours = sketch(modify_scores=lambda self, s, q, k, block: s + F.pad(q @ k.mT * 8**-0.5, (1, 0))[..., :-1])
# one parameter for each head, which is neither counted nor used
Counted = sketch(__doc__="Parameters: `0`.", size=lambda self, shape: (shape.heads,))
# the same in layers after the first
CountedLater = sketch(
    __doc__=Counted.__doc__, varies_by_layer=True, size=lambda self, shape: (shape.heads if shape.layer else 0,)
)
Misspelt = sketch(__doc__="Parameters: `2H`.")
# a number for each position of training, although the formula has no L
Sized = sketch(__doc__="Parameters: `32`.", size=lambda self, shape: (shape.length,))
# a product that TF32 may round
Rounded = sketch(
    size=lambda self, shape: (shape.head_dim, shape.head_dim),
    modify_scores=lambda self, s, q, k, block: s + q.float() @ self.parameter @ k.float().mT * 8**-0.5,
)
# doubles the distances of the next layer
Doubled = sketch(bias=lambda self, distance: distance.mul_(2)[None].expand(4, -1))
# depends on the length of the input
Ends = sketch(embed=lambda self, x, positions: x + torch.arange(x.shape[-1]) * len(positions.rows))
# its bias overflows at large distances
Explodes = sketch(bias=lambda self, distance: (2.0**distance).expand(4, -1))
# its bias is bf16
Halved = sketch(bias=lambda self, distance: (-distance).bfloat16().expand(4, -1))
# the biases of keys, the features of queries, and the vectors that are added to values are bf16
HalvedKeys = sketch(token_state=first_features, key_bias=lambda self, state: state[..., 0].bfloat16())
HalvedQueries = sketch(query_bias=lambda self, q, state, positions: (q.bfloat16(), torch.ones(8, 4)))
HalvedValues = sketch(value_bias=lambda self: torch.ones(4, 8, dtype=torch.bfloat16))
# the same three hooks with a product that TF32 may round
RoundedKeys = sketch(token_state=first_features, key_bias=lambda self, state: (state @ torch.ones(1, 1))[..., 0])
RoundedQueries = sketch(query_bias=lambda self, q, state, positions: (q @ torch.ones(8, 2), torch.ones(2, 4)))
RoundedValues = sketch(value_bias=lambda self: torch.ones(4, 2) @ torch.ones(2, 8))
# the biases of keys, or the features of queries, read later tokens
FutureKeys = sketch(
    token_state=first_features, key_bias=lambda self, state: state[..., 0] * state.sum((2, 3))[..., None]
)
FutureQueries = sketch(
    token_state=first_features,
    query_bias=lambda self, q, state, positions: (q.float() * state[:, :, -1:], torch.arange(32).view(8, 4) / 32),
)
# correct; multiplies scores by 1
Weighted = sketch(score_scale=lambda self, distance: torch.ones(4, len(distance)))
# its bias is fp32, of distances in bf16
Truncated = sketch(bias=lambda self, distance: -distance.bfloat16().log1p().float().expand(4, -1))
# positions are rounded if the input is bf16: in the embeddings, in the angles of keys, or in the distances
RoundedEmbedding = sketch(embed=lambda self, x, positions: x + (positions.ids.to(x.dtype) / 5).sin()[:, None])
RoundedAngles = sketch(
    transform_qk=lambda self, q, k, state, positions: (q, k * (positions.ids.to(k.dtype) / 5).cos()[:, None])
)
RoundedDistances = sketch(modify_scores=lambda self, s, q, k, block: s - block.distance.to(q.dtype).float())
# its states are bf16 if the input is bf16
RoundedStates = sketch(token_state=lambda self, x, positions, past: (x / 3)[:, None])
# rotates keys by their index in the sequence, not by their position
RowRotated = sketch(
    transform_qk=lambda self, q, k, state, positions: (q, k * torch.cos(positions.rows / 10)[-k.shape[2] :, None])
)
# biases and scores of keys, embeddings or outputs depend on this index
RowKeys = sketch(
    token_state=lambda self, x, positions, past: positions.rows.float()[:, None].expand(len(x), 4, -1, -1),
    key_bias=lambda self, state: state[..., 0],
)
RowScores = sketch(modify_scores=lambda self, s, q, k, block: s + block.keys.rows / 10)
RowEmbedded = sketch(embed=lambda self, x, positions: x + (positions.rows / 10).sin()[:, None])
RowOutputs = sketch(
    add_to_output=lambda self, p, v, block: (p * block.keys.rows).sum(-1, keepdim=True).expand(-1, -1, -1, 8)
)
# adds its bias only if positions are contiguous
Gapless = sketch(modify_scores=lambda self, s, q, k, block: s - block.distance if block.keys.contiguous else s)

# uses the positions of the first sequence for all
FirstPositions = sketch(embed=lambda self, x, positions: x + positions.ids.view(-1, x.shape[1])[:1, :, None] / 10)
# depends on the index of a key head, which is not that of the query head
KeyHeads = sketch(transform_qk=lambda self, q, k, state, positions: (q, k * torch.arange(k.shape[1])[:, None, None]))
# its parameter follows the precision of the network
Converted = sketch(size=Counted.size, _apply=nn.Module._apply)
# scores depend on the index of the query in the sequence, not in its document
Rows = sketch(modify_scores=lambda self, s, q, k, block: s * (1 + block.queries.rows[:, None] / 300))
# queries have no gradient
Detached = sketch(transform_qk=lambda self, q, k, state, positions: (q.detach(), k))
# correct, and in fp32 also in an fp64 network
Single = sketch(
    size=Counted.size, bias=lambda self, distance: (self.parameter.float()[:, None] * -distance.float()).to(distance)
)
# another computation if it is compiled
Compiled = sketch(
    modify_scores=lambda self, s, q, k, block: s * 1.5 if torch.compiler.is_compiling() else s,
)


WRONG: list[tuple[Any, Property, str]] = [
    (FarAway, forward_pass.no_dependence_on_later_tokens, "before a changed token 60 of 90"),
    (
        partial(FarAway, far=400),
        forward_pass.no_gradient_from_later_logits,
        "token 430 of 450 .* for a later embedding",
    ),
    (SecondBlock, forward_pass.block_size, "in blocks of 42, window None, 300 tokens"),
    (Cached, forward_pass.decoding_with_a_cache, "logits from a cache"),
    (SecondSequence, forward_pass.no_dependence_on_other_sequences, "logits of 30 tokens in a batch"),
    (After64, forward_pass.shift_invariance, "is True, but an offset of 499 changes logits of 90 tokens"),
    (LimitedAfter64, forward_pass.shift_invariance, "but an offset of 499 changes logits of 90 tokens"),
    (Neighbours, forward_pass.reach_of_a_window, "out of reach of a changed token"),
    (Counted, forward_pass.number_of_parameters, "4 parameters"),
    (CountedLater, forward_pass.number_of_parameters, "4 parameters"),
    (Misspelt, forward_pass.number_of_parameters, "the formula 2H in the docstring is not valid"),
    (Counted, parameters.gradient_of_every_parameter, "parameter has no gradient"),
    (Rounded, fp32_computation.no_rounded_products, "may round it"),
    (Sized, parameters.sizes_of_tensors, "shapes of tensors are"),
    (Attribute, parameters.sizes_of_tensors, r"\(16,\).* at training length 16"),
    (Ends, forward_pass.prefix_consistency, "first 17 of 30"),
    (Explodes, parameters.finite_logits_at_64_times_the_training_length, "not finite"),
    (Halved, fp32_computation.hooks_in_fp32, r"bias is torch\.bfloat16"),
    (HalvedKeys, fp32_computation.hooks_in_fp32, r"key_bias is torch\.bfloat16"),
    (HalvedQueries, fp32_computation.hooks_in_fp32, r"features is torch\.bfloat16"),
    (HalvedValues, fp32_computation.hooks_in_fp32, r"value_bias is torch\.bfloat16"),
    *(
        (strategy, fp32_computation.hooks_in_fp32, f"^{what} for bf16 input has a relative error of ")
        for what, strategy in {
            "embed": RoundedEmbedding,
            "k": RoundedAngles,
            "scores": RoundedDistances,
            "token_state": RoundedStates,
        }.items()
    ),
    *((x, fp32_computation.no_rounded_products, "may round it") for x in (RoundedKeys, RoundedQueries, RoundedValues)),
    *((x, forward_pass.no_dependence_on_later_tokens, "before a changed token") for x in (FutureKeys, FutureQueries)),
    (Truncated, fp32_computation.no_rounded_products, r"returns torch\.bfloat16; compute in fp32"),
    *(
        (strategy, forward_pass.positions_of_keys, rf"^{what} changes by positions\.rows; use positions\.ids")
        for what, strategy in {
            "k": RowRotated,
            "key_bias": RowKeys,
            "scores": RowScores,
            "embed": RowEmbedded,
            "add_to_output": RowOutputs,
        }.items()
    ),
    (WarmUp, parameters.state_dict_is_complete, "logits after loading; register numbers that change"),
    (Stale, parameters.state_dict_is_complete, "logits after loading; keep no results that depend on parameters"),
    (Doubled, fp32_computation.hooks_in_fp32, "modifies distance in place"),
    (Gapless, forward_pass.distances_of_pairs, "marked as not contiguous"),
    (Filled, parameters.nan_in_parameters, "replaces NaN by a number"),
    (FirstPositions, forward_pass.positions_of_each_sequence, "different positions per sequence"),
    (KeyHeads, forward_pass.grouped_query_attention, "logits with 2 key heads for 4 heads"),
    (Narrow, forward_pass.head_dimension, r"^k for D = 32, H = 4, δ = 16; use shape\.head_dim"),
    (Rows, forward_pass.documents_alone, "logits of documents of 10 and 20 tokens"),
    (Detached, parameters.derivatives_of_losses, r"the derivative for blocks\.0\.attention\.qkv\.weight is"),
    *((x, parameters.tensors_are_registered, "^all is a plain tensor") for x in (Attribute, AttributeOfList)),
    (Valued, parameters.building_without_values, "reads a value of a tensor when it is built: "),
    (Compiled, forward_pass.torch_compile, "logits compiled by eager"),
    (Counting, parameters.activation_checkpointing, "differs with activation checkpointing"),
    (Kept, parameters.blocks_computed_again, "differs if blocks of queries are computed again"),
    (Unlimited, parameters.ranges_of_parameters, "rate is outside 0.01 to "),
    (Converted, fp32_computation.parameters_in_fp32, r"parameter is torch\.bfloat16"),
    (Counted, fp32_computation.training_in_bf16_mixed, "parameter has no gradient"),
]
IN_LAYERS = (Neighbours, FutureKeys, RoundedKeys, Halved, Sized, Filled)


@pytest.mark.parametrize(("wrong", "test", "message"), [entry for entry in WRONG if entry[0] in IN_LAYERS])
def test_a_wrong_strategy_is_detected_in_any_kind_of_layers(wrong: Any, test: Property, message: str) -> None:
    for kinds in ({"a": wrong, "b": Sketch, "c": Sketch}, {"a": Sketch, "b": wrong, "c": Sketch}):
        with pytest.raises(AssertionError, match=message):
            test(Subject(partial(LayerPattern, kinds=kinds), fast=True))


def test_kinds_of_layers_are_shift_invariant_if_all_of_them_are() -> None:
    kinds = {"local": RoPE, "global": FIRE}
    assert Combined(Shape(32, 4, 16), [SelfExtend, FIRE]).shift_invariant is False
    forward_pass.shift_invariance(Subject(partial(LayerPattern, kinds=kinds), fast=True))
    with pytest.raises(DoesNotApply):
        forward_pass.shift_invariance(Subject(partial(LayerPattern, kinds={"a": RoPE, "b": SelfExtend}), fast=True))


def test_each_property_has_a_wrong_strategy() -> None:
    tested = {test for _, test, _ in WRONG} | {fp32_computation.error_in_bf16}  # see the last test
    assert tested == {*PROPERTIES.values()}


def test_a_strategy_that_computes_in_fp32_in_an_fp64_network_has_derivatives() -> None:
    assert outcome(Subject(Single), "Gradients are the derivatives of the losses").holds


@pytest.mark.parametrize(("wrong", "test", "message"), WRONG)
def test_a_wrong_strategy_is_detected(wrong, test: Property, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        test(Subject(wrong))


def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its result rounded to bf16 and cast back."""

    def round_result(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        return None if result is None else result.copy_(result.bfloat16())

    return round_result


def with_rounded_bias(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its last argument, the bias of each key, rounded to bf16 and cast back."""
    return lambda *args: function(*args[:-1], args[-1].bfloat16().to(args[-1].dtype))


@pytest.mark.parametrize(
    ("strategy", "module", "name", "rounding"),
    [
        (CoPE, query_block_attention, "_products", rounded),
        (LearnedRelativeBias, query_block_attention, "add_query_bias", rounded),
        (Shaw, query_block_attention, "add_query_bias", rounded),
        (FoX, cpu, "attend_key_bias", with_rounded_bias),
        (Weighted, cpu_forward.TiledForward, "scores", rounded),
    ],
)
def test_rounded_scores_are_detected(strategy, module: Any, name: str, rounding: Callable, monkeypatch) -> None:
    """Scores or biases are rounded to bf16 and cast back, in attention in blocks of queries and in fused attention."""
    fp32_computation.error_in_bf16(Subject(strategy))
    monkeypatch.setattr(module, name, rounding(getattr(module, name)))
    with pytest.raises(AssertionError, match=r"relative error in bf16 0\.0\d+, of fused attention 0.00\d+"):
        fp32_computation.error_in_bf16(Subject(strategy))
