"""`rfc`: the RFCs in Debian's packages `doc-rfc-*`, without page breaks, running heads and page numbers.

apt fetches the packages into a separate folder. It uses a copy of the machine's package sources, with the component
non-free added. The system is not changed, and only the texts of the packages are used.

If one RFC replaces another, both are in the same family. A family has the name of its first RFC. The file rfc.txt
beside this module lists the RFCs. Each line has the name of an RFC and the first 16 hexadecimal digits of the sha256 of
its text after `without_pages`. If the RFC is not the first of its family, the name of the family follows. The families
were computed from rfc-index.txt in Debian's package doc-rfc-std, version 20230121-1.
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
from kerple.data.prepare.external_downloader import download_folder, run_downloader
from kerple.data.prepare.readers import Document

LIST = Path(__file__).with_name("rfc.txt")
PACKAGES = ("experimental", "fyi-bcp", "informational", "misc", "old-std", "others", "std", "std-proposed")
SOURCES = Path("/etc/apt")
MEMBER = re.compile(r".*/(rfc[1-9]\d*\.txt(\.gz)?)")  # path of the text of an RFC in a package
ADVICE = "set data.source to a folder of rfc1.txt, rfc2.txt and so on (rfc-editor.org has them as one archive)"
NUMBER = re.compile(r"\d+|\b[ivxlc]+\b")
PAGE_END = re.compile(r"^(.*\[page +\w+\])[ \t]*\n(?!\s*\f)", re.M | re.I)  # a page number that no form feed follows


def read_rfcs(folder: Path) -> Iterator[Document]:
    """Yield the RFCs in rfc.txt, in the order of a hash of their names. The group of a document is its family.

    Args:
        folder: Folder of rfc1.txt, rfc2.txt and so on, each of them compressed (rfc1.txt.gz) or not. If one is missing,
            all RFCs are fetched into the folder.

    Raises:
        UserError: The RFCs cannot be fetched, or one is missing in Debian's packages or differs from rfc.txt.
    """
    listed = {name: about for name, *about in map(str.split, LIST.read_text(encoding="utf-8").splitlines())}
    if listed.keys() - _names(folder):
        fetch_rfcs(folder)
    if missing := sorted(listed.keys() - _names(folder)):
        given = f"got {folder}, which lacks {len(missing)} of {len(listed)} RFCs: {', '.join(missing[:5])}"
        raise UserError(f"data.source: {given}; {ADVICE}")
    for name in sorted(listed, key=lambda name: hashlib.sha256(name.encode()).digest()):
        path = folder / f"{name}.txt"
        content = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
        try:
            text = without_pages(content.decode("utf-8-sig"))
        except UnicodeDecodeError:
            text = without_pages(content.decode("latin-1"))
        checksum, *family = listed[name]
        if hashlib.sha256(text.encode()).hexdigest()[:16] != checksum:
            given = f"got {folder}, where the text of {name} does not have the checksum in the list of RFCs"
            raise UserError(f"data.source: {given}; delete its file and run again, or {ADVICE}")
        yield Document(path.name, text, family[0] if family else name)


def _names(folder: Path) -> set[str]:
    """Return the names of the RFCs in a folder, such as ``rfc1``."""
    return {path.name.partition(".")[0] for path in folder.glob("rfc*.txt*")}


def fetch_rfcs(folder: Path) -> None:
    """Download Debian's packages of RFCs by apt, and write their texts into a folder.

    Raises:
        UserError: apt is not installed, or cannot fetch the packages.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise UserError(f"data.corpus: got rfc, which needs Debian's apt-get and dpkg-deb; {ADVICE}")
    with download_folder(folder) as downloads:
        for name in ("sources", "lists/partial", "cache/archives/partial"):
            (downloads / "apt" / name).mkdir(parents=True)
        for path in filter(Path.is_file, [SOURCES / "sources.list", *SOURCES.glob("sources.list.d/*")]):
            lines = re.sub(rb"^((deb|Components:)\s.*\bmain\b.*)", rb"\1 non-free", path.read_bytes(), flags=re.M)
            (downloads / "apt/sources" / path.name).write_bytes(lines)
        sources = ["--option=Dir::Etc::SourceList=/dev/null", f"--option=Dir::Etc::SourceParts={downloads}/apt/sources"]
        state = [f"--option=Dir::State::Lists={downloads}/apt/lists", f"--option=Dir::Cache={downloads}/apt/cache"]
        apt = ["apt-get", *sources, *state]
        subprocess.run([*apt, "update"], capture_output=True)  # if it fails, the download reports an error
        run_downloader([*apt, "download", *(f"doc-rfc-{name}" for name in PACKAGES)], downloads / "apt", ADVICE)
        for package in (downloads / "apt").glob("*.deb"):
            with (
                subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process,
                tarfile.open(fileobj=process.stdout, mode="r|") as archive,
            ):
                for member in archive:
                    if (match := MEMBER.fullmatch(member.name)) and member.isreg():
                        (downloads / match[1]).write_bytes(cast("IO[bytes]", archive.extractfile(member)).read())


def without_pages(text: str) -> str:
    """Return the text of an RFC without page breaks.

    - The first line of a page is dropped if it has a page number in brackets, or if at least 3 pages and at least 25%
      of all pages begin with this line. Case, numbers and the amount of space do not matter in this comparison. The
      rule is applied three times to the first line of each page, and then three times to the last line.
    - Pages are joined by an empty line. If a page does not end with one of .:;!? and the next page begins with a
      lower-case letter, the page break is inside a sentence, and there is no empty line.
    - White space at the end of lines is removed, and several empty lines become one.
    """
    text = PAGE_END.sub("\\1\n\f", text.replace("\r\n", "\n").replace("\x00", ""))
    pages = [[line.rstrip() for line in page.strip("\n\f ").split("\n")] for page in text.split("\f")]
    pages = [_without_empty_ends(page) for page in pages]
    for end in (0, -1):
        for _ in range(3):  # running heads have up to three lines
            lines = Counter(_pattern(page[end]) for page in pages if page)
            for number, page in enumerate(pages):
                if page and (
                    lines[_pattern(page[end])] >= max(3, len(pages) / 4) or re.search(r"\[page +\w+\]", page[end], re.I)
                ):
                    pages[number] = _without_empty_ends(page[1:] if end == 0 else page[:-1])
    whole = ""
    for page in pages:
        in_sentence = whole and page and whole[-1] not in ".:;!?" and page[0].lstrip()[:1].islower()
        whole += ("\n" if in_sentence else "\n\n" if whole and page else "") + "\n".join(page)
    return re.sub(r"\n{3,}", "\n\n", whole) + "\n"


def _without_empty_ends(lines: list[str]) -> list[str]:
    """Return the lines without the empty ones at the beginning and the end."""
    full = [number for number, line in enumerate(lines) if line.strip()]
    return lines[full[0] : full[-1] + 1] if full else []


def _pattern(line: str) -> str:
    """Return a line in lower case, in which # replaces each number and one space replaces several."""
    return " ".join(NUMBER.sub("#", line.lower()).split())
