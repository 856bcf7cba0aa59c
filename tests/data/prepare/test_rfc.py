import gzip
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kerple.base.errors import UserError
from kerple.data.prepare import rfc
from kerple.data.prepare.rfc import read_rfcs, without_pages

TEXTS = {"rfc7": "Seven is   \r\na number.\n", "rfc12": "\ufeffTwelve, naïve.\n", "rfc30": "Thirty.\n"}
CLEAN = {"rfc7": "Seven is\na number.\n", "rfc12": "Twelve, naïve.\n", "rfc30": "Thirty.\n"}


def page(number: int, body: str) -> str:
    head = f"RFC 99          Doves as Carriers\n                      May {1990 + number}\n\n"
    return f"{head}\n{body}\n\n\nNoah{'Standards Track':>30}{f'[Page {number}]':>20}\n"


def test_pages_of_an_rfc_become_one_text() -> None:
    bodies = [
        "1. Doves\n\n   A dove carries a message, and what",
        "   it carries arrives.  Table:\n\n   | a dove |",
        "   | a dove |",
        "   Ends here.",
        "   A new paragraph, and after it\n\n\n\n   two.",
    ]
    text = "\n\n\f".join(page(i, body) for i, body in enumerate(bodies, 1))
    expected = (
        "1. Doves\n\n   A dove carries a message, and what\n   it carries arrives.  Table:\n\n   | a dove |\n\n"
        "   | a dove |\n\n   Ends here.\n\n   A new paragraph, and after it\n\n   two.\n"
    )
    assert without_pages(text) == expected
    assert without_pages(text.replace("\f", "")) == expected
    assert without_pages("One page.\n\n\n\nOf a new RFC.\n") == "One page.\n\nOf a new RFC.\n"
    assert without_pages("a\n\fa\n\fb\n") == "a\na\nb\n"  # twice is no running head


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of RFCs that an apt-get of our own has as a package, and a list of them; sources have one section."""
    monkeypatch.setattr(rfc, "LIST", tmp_path / "rfc.txt")
    checksums = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in CLEAN.items()}
    (tmp_path / "rfc.txt").write_text("".join(f"{name} {checksum}\n" for name, checksum in checksums.items()))
    texts = tmp_path / "package/usr/share/doc/RFC/standard"
    texts.mkdir(parents=True)
    (texts / "rfc7.txt").write_bytes(TEXTS["rfc7"].encode())
    (texts / "rfc12.txt.gz").write_bytes(gzip.compress(TEXTS["rfc12"].encode()))
    (texts / "rfc30.txt").write_bytes(TEXTS["rfc30"].encode())
    (texts / "rfc31.html").write_text("no text")
    (texts / "rfc8.txt").symlink_to("rfc7.txt")
    (tmp_path / "package/DEBIAN").mkdir()
    control = "Package: doc-rfc-std\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <a@b.c>\nDescription: RFCs\n"
    (tmp_path / "package/DEBIAN/control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", tmp_path / "package", tmp_path / "std.deb"], check=True, capture_output=True)
    (tmp_path / "sources/sources.list.d").mkdir(parents=True)
    deb822 = "Types: deb\nURIs: http://d.org\nSuites: x\nComponents: main\n"
    (tmp_path / "sources/sources.list.d/debian.sources").write_text(deb822)
    (tmp_path / "sources/sources.list").write_text("deb http://d.org x main\n# deb http://d.org y main\n")
    monkeypatch.setattr(rfc, "SOURCES", tmp_path / "sources")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/apt-get"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *update*) exit 100;; esac\n'
        f"cat ../apt/sources/* > {tmp_path}/seen\n"
        f'test -e {tmp_path}/offline && {{ echo "E: no network" >&2; exit 100; }}\ncp {tmp_path}/std.deb .\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb of Debian")
def test_rfcs_come_from_debians_packages_once(apt: Path) -> None:
    folder = apt / "cache/rfc"
    (apt / "offline").touch()
    with pytest.raises(UserError, match=r"data\.corpus: .*\(no network\).*start again.*data\.source"):
        list(read_rfcs(folder))
    (apt / "offline").unlink()
    documents = {document.name: document.text for document in read_rfcs(folder)}
    assert documents == {f"{name}.txt": text for name, text in CLEAN.items()}
    assert (apt / "seen").read_text().count("main non-free") == 2
    assert "Dir::State::Lists=" in (apt / "calls").read_text()
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["rfc12.txt.gz", "rfc30.txt", "rfc7.txt"]
    calls = (apt / "calls").read_text()
    assert [d.text for d in read_rfcs(folder)] == list(documents.values())
    assert (apt / "calls").read_text() == calls  # nothing is fetched again


def test_a_folder_of_ones_own_is_taken_and_what_it_lacks_is_named(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = apt / "mine"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_bytes(text.encode())
    (folder / "rfc12.txt").write_bytes("Twelve, na\xefve.\n".encode("latin-1"))
    (folder / "rfc9999.txt").write_text("newer than the list")
    assert {document.text for document in read_rfcs(folder)} == set(CLEAN.values())
    (folder / "rfc30.txt").write_text("Thirty-one.\n")
    with pytest.raises(UserError, match=r"data\.source: .*rfc30\.txt has another text"):
        list(read_rfcs(folder))
    (folder / "rfc30.txt").unlink()
    monkeypatch.setenv("PATH", str(apt))
    with pytest.raises(UserError, match=r"data\.corpus: got rfc, which Debian's apt-get fetches.*data\.source"):
        list(read_rfcs(folder))
    monkeypatch.setattr(rfc, "fetch_rfcs", lambda folder: None)
    with pytest.raises(UserError, match=r"data\.source: .*mine lacks rfc30: 1 of 3 RFCs; name a folder"):
        list(read_rfcs(folder))
