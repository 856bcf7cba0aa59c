"""Differences between a run that exists and what is asked for."""

from kerple.base.changes import differences


class Options:
    """Stands for a class whose options a configuration sets."""

    def __init__(self, old: int = 1, betas: tuple[float, float] = (0.9, 0.99), newer: float | None = None) -> None: ...


def test_an_option_that_is_newer_than_a_run_is_no_difference_at_its_default() -> None:
    base = {"data.class_path": f"{__name__}.Options", "data.init_args.old": 2}
    now = base | {"data.init_args.newer": None, "data.init_args.betas": [0.9, 0.99], "model.muon": True}
    assert differences(base, base | {"data.init_args.newer": None, "data.init_args.betas": [0.9, 0.99]}) == []
    assert differences(base, now) == ["model.muon: (not there) -> True"]
    assert differences(base, base | {"data.init_args.newer": 0.5}) == ["data.init_args.newer: (not there) -> 0.5"]
    assert differences(base | {"gone": 1}, base) == ["gone: 1 -> (not there)"]
