"""Shipped configurations are found from anywhere, and a user's own files come first."""

from pathlib import Path

from kerple.base.shipped_configs import config_path, with_shipped_configs


def test_the_users_own_file_comes_first_and_only_configs_are_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo = config_path("configs/demo.yaml")
    assert Path(demo).is_file()
    assert not Path(demo).is_relative_to(tmp_path)
    assert config_path("configs/none.yaml") == "configs/none.yaml"
    typed = ["fit", "--config", "configs/demo.yaml", "--config=configs/demo.yaml", "--prompt", "configs/demo.yaml"]
    assert with_shipped_configs(typed) == ["fit", "--config", demo, f"--config={demo}", "--prompt", "configs/demo.yaml"]
    assert Path(with_shipped_configs(["--model", "configs/model/162m.yaml"])[1]).is_file()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("{}")
    assert with_shipped_configs(typed) == typed
