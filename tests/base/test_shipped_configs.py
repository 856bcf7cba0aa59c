"""Shipped configurations are found from anywhere, and a user's own files come first."""

from pathlib import Path

import pytest

from kerple.base.shipped_configs import found, with_shipped_configs


def test_the_users_own_file_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = found("configs/demo.yaml")
    assert Path(shipped).is_file()
    assert not Path(shipped).is_relative_to(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("{}")
    assert found("configs/demo.yaml") == "configs/demo.yaml"


@pytest.mark.parametrize("path", ["configs/none.yaml", "demo.yaml", "other/configs/demo.yaml", ""])
def test_what_is_not_shipped_stays_as_it_is(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert found(path) == path


def test_only_configs_are_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo = found("configs/demo.yaml")
    given = ["fit", "--config", "configs/demo.yaml", "--config=configs/demo.yaml", "--prompt", "configs/demo.yaml"]
    assert with_shipped_configs(given) == ["fit", "--config", demo, f"--config={demo}", "--prompt", "configs/demo.yaml"]
