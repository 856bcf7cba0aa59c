"""The public suite on strategies from anywhere: a right one, and wrong sketches that each property is there for."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention import blocks
from kerple.cli.main import main
from kerple.positions import ALiBi, FoX, Position, QueryKeyBlock, RandomizedPositions, Shape, TokenPositions
from kerple.positions.wrapper import Wrapper
from kerple.testing import PROPERTIES, DoesNotApply, Outcome, Subject, check

PAGE = Path(__file__).parents[2] / "docs/how-to/own-strategy.md"


@pytest.fixture
def my_file(tmp_path: Path, monkeypatch) -> Path:
    """The code of the page on a strategy of one's own, as the file it is told to be put in."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code
    (tmp_path / "my_file.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_file", None)


def test_a_strategy_from_a_file_of_ones_own_holds_to_everything(my_file: Path) -> None:
    sys.path.insert(0, str(my_file))
    found = check(importlib.import_module("my_file").Root, start=0.3)

    assert [o.name for o in found] == list(PROPERTIES)
    assert [o for o in found if not o.holds] == [Outcome("a wrapper forwards every hook", None, "it is no Wrapper")]


def test_the_command_prints_what_holds(my_file: Path, capsys, monkeypatch) -> None:
    two = ("a wrapper forwards every hook", "the docstring counts the parameters")
    kept = {name: PROPERTIES[name] for name in two}
    monkeypatch.setattr("kerple.testing.PROPERTIES", kept)
    monkeypatch.setattr("kerple.cli.check.PROPERTIES", kept)
    main(["check", "--model.position", "my_file.Root", "--model.position.start", "0.3"])

    told = capsys.readouterr().out.splitlines()
    assert [line.split("  ", 1)[1].strip().split(":")[0] for line in told] == list(two)
    assert [line.split("  ")[0] for line in told] == ["does not apply", "holds"]


@pytest.mark.usefixtures("few")
def test_the_command_ends_with_status_1_where_something_fails(my_file: Path, capsys) -> None:
    text = (my_file / "my_file.py").read_text().replace("Parameters: `H`", "Parameters: `2 * H`")
    (my_file / "my_file.py").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--model.position", "my_file.Root"])

    assert ended.value.code == 1
    told = capsys.readouterr()
    assert "FAILS           the docstring counts the parameters: 4 parameters, the docstring says 2 * H = 8" in told.out
    assert told.err == "1 of 2 properties do not hold\n"


class Sketch(Position):
    """Right in everything but what a subclass gets wrong.

    Parameters: `0`. Cost: none.
    """

    shift_invariant = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()


class Undocumented(Sketch):
    pass


class Slip(Sketch):
    """Its formula is none.

    Parameters: `2H`.
    """


class Neighbours(Sketch):
    """Scores and those of the key before, also where no query may see it: beyond the window, or out of the block.

    Parameters: `0`.
    """

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        raw = q @ k.mT * 8**-0.5
        return s + F.pad(raw, (1, 0))[..., :-1]


class Mean(Sketch):
    """Scores against the mean of the block's: one of another size has another.

    Parameters: `0`.
    """

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        return s / (1 + s.abs().mean(-1, keepdim=True))


class Future(Sketch):
    """Every token is told of the last one.

    Parameters: `0`.
    """

    def embed(self, x: Tensor, at: TokenPositions) -> Tensor:
        return x + x[:, -1:]


class Counted(Sketch):
    """One parameter, the docstring counts none; it is never used.

    Parameters: `0`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.strength = nn.Parameter(torch.zeros(shape.heads))


class Rounded(Sketch):
    """A product that TF32 may round.

    Parameters: `δ * δ`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.matrix = nn.Parameter(torch.eye(shape.head_dim))

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        return s + q.float() @ self.matrix @ k.float().mT * 8**-0.5


class Dropped(Wrapper):
    """Forgets a hook of what it wraps.

    Parameters: `0`. Cost: that of ALiBi.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(ALiBi(shape))

    def __getattribute__(self, name: str):  # as if the loop had left it out
        if name == "sink_logit":
            return lambda q, at: None
        return super().__getattribute__(name)


class InPlace(Sketch):
    """A product written into the scores.

    Parameters: `0`.
    """

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        flat = s.flatten(0, 1).clone()
        return flat.baddbmm_(q.float().flatten(0, 1), k.float().flatten(0, 1).mT).view_as(s)


class Sized(Sketch):
    """A number for each position of training, which the docstring does not say.

    Parameters: `32`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.rows = nn.Parameter(torch.zeros(shape.length))


class Ends(Sketch):
    """Knows how long the input is.

    Parameters: `0`.
    """

    def embed(self, x: Tensor, at: TokenPositions) -> Tensor:
        return x + torch.arange(x.shape[-1]) * len(at.rows)


class Explodes(Sketch):
    """Its bias overflows far out.

    Parameters: `0`.
    """

    def bias(self, distance: Tensor) -> Tensor:
        return (2.0**distance).expand(4, -1)


class Halved(Sketch):
    """Its bias is of half precision.

    Parameters: `0`.
    """

    def bias(self, distance: Tensor) -> Tensor:
        return (-distance).bfloat16().expand(4, -1)


class Gapless(Sketch):
    """Adds its bias only where positions have no gaps.

    Parameters: `0`.
    """

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        return s - block.distance if block.keys.contiguous else s


class Filled(Sketch):
    """Makes a number of a parameter that is none.

    Parameters: `H`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.learn("rate", shape.heads, 0.5, minimum=0.01)

    def clamp_(self) -> None:
        self.rate.data.nan_to_num_(0.01)


@pytest.mark.parametrize(
    ("wrong", "name", "said"),
    [
        (Neighbours, "a window hides what is before it and nothing else", "out of reach of a changed token"),
        (Neighbours, "the size of a block changes nothing", "in blocks of"),
        (Mean, "the size of a block changes nothing", "in blocks of"),
        (Future, "the past has no gradient from the future", "gradient from a later one"),
        (Future, "what comes later changes nothing", "before a changed token"),
        (Counted, "the docstring counts the parameters", "4 parameters"),
        (Counted, "ddp finds no unused parameter", "finished reduction"),
        (Counted, "gradients reach every parameter", "strength has no gradient"),
        (Rounded, "neither autocast nor tf32 reaches what it computes", "may round it"),
        (InPlace, "neither autocast nor tf32 reaches what it computes", "may round it"),
        (Dropped, "a wrapper forwards every hook", "sink_logit is not forwarded"),
        (Sized, "nothing is sized by the training length", "parameters of"),
        (Ends, "the logits of a prefix are the prefix of the logits", "first 17 of 30"),
        (Ends, "reading token by token gives what reading at once does", "from a cache"),
        (Explodes, "logits are finite at 64 times the training length or it is refused", "not finite"),
        (Halved, "bf16 weights and autocast leave positions in fp32", r"bias is torch\.bfloat16"),
        (Gapless, "positions read pair by pair are those read in line", "said to have gaps"),
        (Filled, "what is not a number stays so", "makes a number of NaN"),
    ],
)
def test_what_is_wrong_is_found(wrong: type[Position], name: str, said: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=said):  # DDP raises the latter
        PROPERTIES[name](Subject(wrong))


@pytest.fixture
def few(monkeypatch) -> None:
    """Two properties only, for what does not depend on which there are."""
    kept = {name: PROPERTIES[name] for name in ("ddp finds no unused parameter", "the docstring counts the parameters")}
    monkeypatch.setattr("kerple.testing.PROPERTIES", kept)
    monkeypatch.setattr("kerple.cli.check.PROPERTIES", kept)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Undocumented, "the docstring of Undocumented has no line 'Parameters: `formula`'"),
        (Slip, "the docstring says 'Parameters: `2H`', expected a Python expression in D, H, δ, L and the options"),
    ],
)
@pytest.mark.usefixtures("few")
def test_a_docstring_that_counts_nothing_is_quoted(strategy: type[Position], said: str) -> None:
    with pytest.raises(AssertionError) as told:
        check(strategy)
    assert str(told.value).startswith(f"the docstring counts the parameters: {said}")


@pytest.mark.usefixtures("few")
def test_what_fails_is_told_one_line_each() -> None:
    with pytest.raises(AssertionError) as told:
        check(Counted)
    first, second = str(told.value).splitlines()
    assert first.startswith("ddp finds no unused parameter: RuntimeError: Expected to have finished reduction")
    assert second == "the docstring counts the parameters: 4 parameters, the docstring says 0 = 0"


def test_an_attention_that_rounds_scores_is_found(monkeypatch) -> None:
    """As blocks of queries did: q·k in bf16, then cast."""
    name = "bf16 costs no more precision than in the fused way"
    PROPERTIES[name](Subject(FoX))
    products = blocks._products
    monkeypatch.setattr(blocks, "_products", lambda *given: products(*given).bfloat16().float())

    with pytest.raises(AssertionError, match=r"relative error in bf16 0.00\d+, of the fused way 0.00\d+"):
        PROPERTIES[name](Subject(FoX))


def test_a_hook_that_is_not_marked_is_found(monkeypatch) -> None:
    monkeypatch.setattr(Position, "later", lambda self, x: x, raising=False)

    with pytest.raises(AssertionError, match=r"hooks that are not marked: \{'later'\}"):
        PROPERTIES["a wrapper forwards every hook"](Subject(RandomizedPositions))


def test_positions_for_each_sequence_are_refused_where_the_strategy_says_so() -> None:
    class Alone(ALiBi):
        """Parameters: `0`."""

        per_sequence = False

    with pytest.raises(DoesNotApply, match=r"per_sequence is False, and positions \(B, T\) are refused"):
        PROPERTIES["sequences may have positions of their own"](Subject(Alone))
