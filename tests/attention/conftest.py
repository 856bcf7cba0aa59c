import pytest

from kerple.base import bf16


@pytest.fixture(autouse=True)
def _bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test attention in bf16 on every processor. Without bf16 instructions, `attend` would convert bf16 to fp32."""
    monkeypatch.setattr(bf16, "bf16_instructions", lambda: "AMX")
