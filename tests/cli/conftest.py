import pytest

from tests.cli.tiny import fit


@pytest.fixture(scope="session")
def genuine(tmp_path_factory):
    """The checkpoint of a fit of one step."""
    return fit(tmp_path_factory.mktemp("genuine"), "--trainer.gradient_clip_val=1.5")
