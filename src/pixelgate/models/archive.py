"""A checkpoint's small files out of an archive that somebody else has made."""

from __future__ import annotations

import io
import re
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from pixelgate.errors import CheckpointError
from pixelgate.models.checkpoint import ADDITIONAL_TEMPLATES, FILES

MAX_UNPACKED_BYTES = 256 << 20
_TEMPLATE = re.compile(rf"{ADDITIONAL_TEMPLATES}/\w[\w.-]*\.jinja", re.ASCII)
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def unpack(archive: bytes, folder: Path) -> frozenset[str]:
    """Write the files that are read of a checkpoint from a ZIP into ``folder``, and return their names.

    Everything else in it is left unread. Raises CheckpointError for an archive that is damaged, that would unpack to
    more than 256 MiB, or that has links, paths leading elsewhere, or a file twice.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            wanted = _wanted(opened.infolist())
            for entry in wanted:
                (folder / entry.filename).parent.mkdir(exist_ok=True)
                with opened.open(entry) as packed, (folder / entry.filename).open("xb") as file:
                    # one more than the size that was checked: without a number it would inflate without a bound
                    file.write(packed.read(entry.file_size + 1))
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise CheckpointError("the archive is damaged, or is no ZIP") from None
    return frozenset(entry.filename for entry in wanted)


def _wanted(entries: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    for entry in entries:
        path = PurePosixPath(entry.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or stat.S_ISLNK(entry.external_attr >> 16):
            raise CheckpointError(f"the archive leads out of its folder: {entry.filename[:80]!r}")
    wanted = [entry for entry in entries if entry.filename in FILES or _TEMPLATE.fullmatch(entry.filename)]
    if len({entry.filename for entry in wanted}) != len(wanted):
        raise CheckpointError("the archive has a file twice")
    if any(entry.compress_type not in _PACKED or entry.flag_bits & 1 for entry in wanted):
        raise CheckpointError("the archive is encrypted, or compressed by an uncommon method")
    if sum(entry.file_size for entry in wanted) > MAX_UNPACKED_BYTES:
        raise CheckpointError(f"the archive unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB")
    return wanted
