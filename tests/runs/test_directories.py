"""No run ever writes into the folder of another."""

from pathlib import Path

from kerple.runs.directories import fit_directory
from kerple.runs.directories import test_directory as folder_of_a_test


def fit(logs: Path, ckpt_path: str | None = None, run_dir: str | None = None) -> Path:
    return fit_directory(run_dir, str(logs), "demo", "RoPE", 7, ckpt_path)


def with_checkpoint(run: Path) -> str:
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    return str(run / "checkpoints" / "last.ckpt")


def test_an_existing_run_gets_a_new_version_beside_it(tmp_path: Path) -> None:
    base = tmp_path / "demo" / "RoPE" / "seed-7"
    for expected in (base, Path(f"{base}_v1"), Path(f"{base}_v2")):
        assert fit(tmp_path) == expected
        expected.mkdir(parents=True)


def test_last_resumes_in_the_newest_version_that_can_be_resumed(tmp_path: Path) -> None:
    base = tmp_path / "demo" / "RoPE" / "seed-7"
    assert fit(tmp_path, "last") == base
    for version in (base, *(Path(f"{base}_v{n}") for n in (2, 10))):
        with_checkpoint(version)
    Path(f"{base}_v11").mkdir()  # stopped before its first checkpoint
    assert fit(tmp_path, "last") == Path(f"{base}_v10")


def test_a_checkpoint_of_a_version_resumes_in_it_and_a_foreign_one_does_not(tmp_path: Path) -> None:
    base = tmp_path / "demo" / "RoPE" / "seed-7"
    first, second = with_checkpoint(base), with_checkpoint(Path(f"{base}_v1"))
    assert fit(tmp_path, first) == base
    assert fit(tmp_path, second) == Path(f"{base}_v1")
    assert fit(tmp_path, str(tmp_path / "elsewhere.ckpt")) == Path(f"{base}_v2")


def test_a_folder_asked_for_is_used_and_never_reused(tmp_path: Path) -> None:
    wanted = tmp_path / "mine"
    assert fit(tmp_path, run_dir=str(wanted)) == wanted
    wanted.mkdir()
    assert fit(tmp_path, run_dir=str(wanted)) == tmp_path / "mine_v1"


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    wanted = tmp_path / "lr[1]"
    with_checkpoint(wanted)
    with_checkpoint(tmp_path / "lr[1]_v1")
    with_checkpoint(tmp_path / "lr1_v2")  # another run's
    assert fit(tmp_path, "last", str(wanted)) == tmp_path / "lr[1]_v1"


def test_a_test_writes_beside_the_checkpoints_of_its_run(tmp_path: Path) -> None:
    checkpoint = with_checkpoint(tmp_path / "run")
    assert folder_of_a_test(None, checkpoint, "test") == tmp_path / "run" / "test"
    (tmp_path / "run" / "test").mkdir()
    assert folder_of_a_test(None, checkpoint, "test") == tmp_path / "run" / "test_v1"
    assert folder_of_a_test(None, str(tmp_path / "loose.ckpt"), "validate") == tmp_path / "validate"
    assert folder_of_a_test(str(tmp_path / "there"), checkpoint, "test") == tmp_path / "there"
