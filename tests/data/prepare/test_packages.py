"""The built-in corpus of installed packages."""

from pathlib import Path

import pytest

from kerple.data.prepare.corpora import sources
from kerple.data.prepare.packages import installed_packages, standard_library
from kerple.data.prepare.sources import TextFiles


def install(site: Path, name: str, requires: list[str], files: dict[str, str]) -> None:
    """What pip leaves of a package: its files, its metadata and a list of both."""
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    listed = [*files, f"{metadata.parent.name}/METADATA", f"{name}/gone.py"]
    (metadata.parent / "RECORD").write_text("".join(f"{path},,\n" for path in listed))


def test_it_holds_what_is_required_however_far_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "mine",
        ["near>=1", "absent", 'extra; extra == "more"', 'old; python_version < "3"'],
        {"mine/a.py": "0"},
    )
    install(tmp_path, "near", ["Far_Away"], {"near/b.py": "1", "near/c.so": "2", "near/sub/d.py": "3"})
    install(tmp_path, "far-away", ["near"], {"far.py": "4"})
    for other in ("extra", "old", "stranger"):
        install(tmp_path, other, [], {f"{other}.py": "5"})
    monkeypatch.syspath_prepend(str(tmp_path))
    added = set(installed_packages("mine").paths) - set(standard_library().paths)
    assert added == {str(tmp_path / path) for path in ("near/b.py", "near/sub/d.py", "far.py")}


def test_the_corpus_is_large_and_the_same_again() -> None:
    (corpus,) = sources("packages")
    assert isinstance(corpus, TextFiles)
    assert corpus.paths == installed_packages().paths != sorted(corpus.paths)
    assert len(set(corpus.paths)) == len(corpus.paths) > 5_000
    assert sum(size for size in corpus.sizes if size > 24_000) > 100_000_000  # bytes of long documents


def test_a_project_that_is_not_installed_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus: got 'packages'.*nobody-has-this is not installed"):
        installed_packages("nobody-has-this")
