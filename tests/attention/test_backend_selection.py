"""The selection of the implementation of attention by `select`, and the errors that `select` raises."""

from typing import Any

import pytest
import torch

from kerple.attention import AttentionSpec, attend, backend_selection
from kerple.attention.backend_selection import AttentionOption
from kerple.base.errors import UserError
from kerple.positions import TokenPositions

CALL: dict[str, Any] = {
    "device": torch.device("cuda"), "dtype": torch.bfloat16, "dims": (64, 64), "queries": "all",
    "few_keys": False, "table_kernel": True, "hidden_keys": False, "explicit_scores": False,
}  # fmt: skip
CPU = {"device": torch.device("cpu")}


@pytest.fixture(autouse=True)
def _gpu_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_selection, "backends_used", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some chip")
    monkeypatch.setattr(backend_selection, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("option", "change", "name"),
    [
        ("auto", {}, "flex"),
        ("auto", {"dtype": torch.float32}, "blocks"),
        ("auto", {"dims": (8, 8)}, "blocks"),
        ("auto", {"explicit_scores": True}, "blocks"),
        ("auto", {"table_kernel": False}, "sdpa"),
        ("auto", {"table_kernel": False, "queries": "last"}, "blocks"),
        ("auto", {"device": torch.device("mps")}, "blocks"),
        ("blocks", {}, "blocks"),
        ("reference", {}, "reference"),
        ("fused", {"queries": "one"}, "blocks"),  # no error, because no kernel with a table supports a cache
        ("auto", CPU | {"dtype": torch.float32, "dims": (8, 8), "queries": "last"}, "tiles"),
        ("auto", CPU | {"table_kernel": False, "hidden_keys": True}, "tiles"),
    ],
)
def test_the_backend_of_each_call(option: AttentionOption, change: dict[str, Any], name: str) -> None:
    assert backend_selection.select(option, **CALL | change) == name


def test_first_keys_need_explicit_scores_only_if_the_window_hides_keys() -> None:
    q = k = v = torch.randn(1, 2, 90, 16)
    for options in ({}, {"value_bias": torch.randn(6, 16), "keys": TokenPositions.arange(90)}):
        out = attend(q, k, v, AttentionSpec(window=90, first_keys=4, **options), "fused")
        torch.testing.assert_close(out, attend(q, k, v, AttentionSpec(**options), "reference"))
    with pytest.raises(UserError, match=r"model\.attention: got 'fused', but .* needs explicit scores"):
        attend(q, k, v, AttentionSpec(window=16, first_keys=4), "fused")


def test_an_older_chip_and_a_system_without_triton_use_blocks(monkeypatch) -> None:
    monkeypatch.setattr(backend_selection, "find_spec", lambda name: None)
    assert backend_selection.select("auto", **CALL) == "blocks"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert backend_selection.select("auto", **CALL) == "blocks"
    with pytest.raises(UserError, match=r"model\.attention: got 'fused', but .* need compute capability 8.0"):
        backend_selection.select("fused", **CALL)


def test_a_backend_is_selected_during_tracing_without_a_graph_break() -> None:
    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, AttentionSpec(table=table)) + attend(q, k, v)

    q, k, v = torch.randn(3, 1, 2, 40, 8)
    table = torch.randn(2, 40)
    out = torch.compile(both, fullgraph=True, backend="eager")(q, k, v, table)
    assert [b.name for b in backend_selection.backends_used] == ["tiles", "sdpa"]  # before the uncompiled call below
    torch.testing.assert_close(out, both(q, k, v, table))
