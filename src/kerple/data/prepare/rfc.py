"""`rfc`: the RFCs of Debian's packages doc-rfc without page breaks, running heads and page numbers.

apt fetches the packages from the package sources of the machine, with the component non-free, into a separate folder.
The system is not changed, and only the texts of the packages are used. rfc.txt lists the RFCs: the name, the first 16
hexadecimal digits of the sha256 of the result of `without_pages`, and the family unless the RFC is the
first of it. RFCs that obsolete each other, directly or through others, are a family. The relation is that of
rfc-index.txt in Debian's package doc-rfc-std, version 20230121-1.
"""

import gzip
import hashlib
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from kerple.base.errors import UserError
from kerple.data.prepare.fetching import arriving, call
from kerple.data.prepare.readers import Document

LIST = Path(__file__).with_name("rfc.txt")
KINDS = ("experimental", "fyi-bcp", "informational", "misc", "old-std", "others", "std", "std-proposed")
SOURCES = Path("/etc/apt")
MEMBER = re.compile(r".*/(rfc[1-9]\d*\.txt(\.gz)?)")
ADVICE = "set data.source to a folder of rfc1.txt, rfc2.txt and so on (rfc-editor.org has them as one archive)"
NUMBER = re.compile(r"\d+|\b[ivxlc]+\b")
PAGE_END = re.compile(r"^(.*\[page +\w+\])[ \t]*\n(?!\s*\f)", re.M | re.I)  # without a form feed


def read_rfcs(folder: Path) -> Iterator[Document]:
    """Yield the listed RFCs, in the order of a hash of their names; the group is the family.

    Args:
        folder: Folder of rfc1.txt, rfc2.txt and so on, or rfc1.txt.gz; the RFCs are fetched if one is missing.

    Raises:
        UserError: The RFCs cannot be fetched, or one is missing or has another text.
    """
    listed = {name: about for name, *about in map(str.split, LIST.read_text(encoding="utf-8").splitlines())}
    if not _present(folder) >= listed.keys():
        fetch_rfcs(folder)
    present = _present(folder)
    if missing := [name for name in listed if name not in present]:
        some = f"{', '.join(missing[:5])}: {len(missing)} of {len(listed)} RFCs"
        raise UserError(f"data.source: {folder} lacks {some}; {ADVICE}")
    for name in sorted(listed, key=lambda name: hashlib.sha256(name.encode()).digest()):
        path = folder / f"{name}.txt"
        content = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
        try:
            text = without_pages(content.decode("utf-8-sig"))
        except UnicodeDecodeError:
            text = without_pages(content.decode("latin-1"))
        checksum, *family = listed[name]
        if hashlib.sha256(text.encode()).hexdigest()[:16] != checksum:
            raise UserError(f"data.source: {path} has another checksum than listed; delete it, or {ADVICE}")
        yield Document(path.name, text, family[0] if family else name)


def _present(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.glob("rfc*.txt*")}


def fetch_rfcs(folder: Path) -> None:
    """Fetch Debian's packages of RFCs by apt, and write the texts into a folder.

    Raises:
        UserError: apt is not installed, or cannot fetch the packages.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise UserError(f"data.corpus: got rfc, which needs Debian's apt-get and dpkg-deb; {ADVICE}")
    with arriving(folder) as fresh:
        for below in ("apt/sources", "apt/lists/partial", "apt/cache/archives/partial"):
            (fresh / below).mkdir(parents=True)
        for path in filter(Path.is_file, [SOURCES / "sources.list", *SOURCES.glob("sources.list.d/*")]):
            lines = re.sub(rb"^((deb|Components:)\s.*\bmain\b.*)", rb"\1 non-free", path.read_bytes(), flags=re.M)
            (fresh / "apt/sources" / path.name).write_bytes(lines)
        folders = {"Etc::SourceParts": "sources", "State::Lists": "lists", "Cache": "cache"}
        options = ["Dir::Etc::SourceList=/dev/null", *(f"Dir::{name}={fresh}/apt/{at}" for name, at in folders.items())]
        apt = ["apt-get", *(f"--option={option}" for option in options)]
        subprocess.run([*apt, "update"], capture_output=True)  # the download reports its errors
        call([*apt, "download", *(f"doc-rfc-{kind}" for kind in KINDS)], ADVICE, fresh / "apt")
        for package in (fresh / "apt").glob("*.deb"):
            with (
                subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as unpacking,
                tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
            ):
                for member in archive:
                    if (match := MEMBER.fullmatch(member.name)) and member.isreg():
                        content = cast("IO[bytes]", archive.extractfile(member)).read()
                        (fresh / match[1]).write_bytes(content)


def without_pages(text: str) -> str:
    """Remove the page breaks of an RFC.

    - The first and the last line of each page are dropped, up to three times, if they have a page number in brackets,
      or if they occur on at least 3 pages and on at least 25% of all pages. Case, numbers and the amount of space do
      not matter in this comparison.
    - Pages are joined by an empty line, except inside a sentence: the first page does not end with one of .:;!? and the
      second begins with a lower-case letter.
    - Spaces at the end of lines are removed, and several empty lines become one.
    """
    text = PAGE_END.sub("\\1\n\f", text.replace("\r\n", "\n").replace("\x00", ""))
    pages = [[line.rstrip() for line in page.strip("\n\f ").split("\n")] for page in text.split("\f")]
    pages = [_stripped(page) for page in pages]
    for end in (0, -1):
        for _ in range(3):  # running heads have up to three lines
            lines = Counter(_pattern(page[end]) for page in pages if page)
            for number, page in enumerate(pages):
                if page and (
                    lines[_pattern(page[end])] >= max(3, len(pages) / 4) or re.search(r"\[page +\w+\]", page[end], re.I)
                ):
                    pages[number] = _stripped(page[1:] if end == 0 else page[:-1])
    whole = ""
    for page in pages:
        inside = whole and page and whole[-1] not in ".:;!?" and page[0].lstrip()[:1].islower()
        whole += ("\n" if inside else "\n\n" if whole and page else "") + "\n".join(page)
    return re.sub(r"\n{3,}", "\n\n", whole) + "\n"


def _stripped(lines: list[str]) -> list[str]:
    """The lines without empty ones at both ends."""
    full = [number for number, line in enumerate(lines) if line.strip()]
    return lines[full[0] : full[-1] + 1] if full else []


def _pattern(line: str) -> str:
    return " ".join(NUMBER.sub("#", line.lower()).split())
