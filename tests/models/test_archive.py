"""Archives from somebody else: what is written, and what is not."""

import io
import stat
import zipfile
import zlib

import pytest

from pixelgate.errors import CheckpointError
from pixelgate.models import archive
from pixelgate.models.archive import unpack
from pixelgate.models.checkpoint import FILES


def packed(*entries, method=zipfile.ZIP_DEFLATED):
    """A ZIP of (name or ZipInfo, content)."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as opened:
        for name, content in entries:
            opened.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_the_files_that_are_read_are_written_and_no_other(tmp_path, method):
    known = [(name, f"content of {name}") for name in FILES]
    others = [("vocab.json", "{}"), ("model.safetensors", "weights"), ("a/config.json", "x"), ("CONFIG.JSON", "x")]
    assert unpack(packed(*known, *others, method=method), tmp_path) == set(FILES)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict(known)


def test_further_chat_templates_are_unpacked_to_their_folder(tmp_path):
    tools, other = "additional_chat_templates/tool_use.jinja", "additional_chat_templates/deep/x.jinja"
    found = unpack(packed(("config.json", "{}"), (tools, "T"), (other, "O"), ("elsewhere/x.jinja", "E")), tmp_path)
    assert found == {"config.json", tools}
    assert (tmp_path / tools).read_text() == "T"
    assert not (tmp_path / "elsewhere").exists()


def link(name):
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    "entry", ["../config.json", "/config.json", "a/../../x", "..\\x", "\\x", link("config.json"), link("x")], ids=str
)
def test_what_leads_elsewhere_is_refused(tmp_path, entry):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        unpack(packed(("tokenizer.json", "{}"), (entry, "/etc/passwd")), folder)
    assert list(tmp_path.rglob("*")) == [folder]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_twice_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has a file twice"):
        unpack(packed(("config.json", "{}"), ("config.json", "[]")), tmp_path)
    assert unpack(packed(("config.json", "{}"), ("x", "1"), ("x", "2")), tmp_path) == {"config.json"}


def test_size_is_limited_by_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 4 << 20)
    data = packed(("config.json", b" " * (3 << 20)), ("tokenizer.json", b" " * (2 << 20)))
    with pytest.raises(CheckpointError, match="unpacks to more than 4 MiB"):
        unpack(data, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert unpack(packed(("config.json", b" "), ("model.safetensors", b" " * (5 << 20))), tmp_path) == {"config.json"}


def test_a_size_that_is_a_lie_is_found_before_all_is_inflated(tmp_path, monkeypatch):
    made = []

    class Counting:
        def __init__(self, *arguments):
            self._inner = zlib._decompressobj(*arguments)

        def decompress(self, data, most=0):
            made.append(self._inner.decompress(data, most))
            return made[-1]

        def __getattr__(self, name):
            return getattr(self._inner, name)

    bomb = packed(("config.json", b" " * (8 << 20)))
    monkeypatch.setattr(zlib, "_decompressobj", zlib.decompressobj, raising=False)
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    with pytest.raises(CheckpointError, match="damaged"):
        unpack(bomb.replace((8 << 20).to_bytes(4, "little"), (10).to_bytes(4, "little")), tmp_path)
    assert 0 < sum(map(len, made)) < 1 << 20


@pytest.mark.parametrize("data", [b"", b"PK", b"no archive", packed(("config.json", "{}"))[:-5]])
def test_what_is_no_archive(tmp_path, data):
    with pytest.raises(CheckpointError, match="damaged, or is no ZIP"):
        unpack(data, tmp_path)


def test_damage_inside_is_found(tmp_path):
    data = bytearray(packed(("config.json", bytes(range(256)) * 8), method=zipfile.ZIP_STORED))
    data[100] ^= 1
    with pytest.raises(CheckpointError, match="damaged"):
        unpack(bytes(data), tmp_path)
    data = bytearray(packed(("config.json", bytes(range(256)) * 8)))
    data[41:60] = b"\xff" * 19
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        unpack(bytes(data), tmp_path)


def test_uncommon_ways_of_packing_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="encrypted, or compressed by an uncommon method"):
        unpack(packed(("config.json", "{}"), method=zipfile.ZIP_LZMA), tmp_path)
    data = bytearray(packed(("config.json", "{}")))
    data[data.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(CheckpointError, match="encrypted"):
        unpack(bytes(data), tmp_path)
