"""Files that a reference names: from one directory, or not at all."""

from __future__ import annotations

import os
import time

import pytest

from pixelgate.errors import MediaError, TooLargeError
from pixelgate.media import files
from pixelgate.media.policy import MediaPolicy
from pixelgate.media.source import FileSource, join, parse

WORDS = "the picture's file cannot be read"


@pytest.fixture
def tree(tmp_path):
    """A root with files, links and things that are no files, beside what must stay out of reach."""
    root = tmp_path / "root"
    (root / "below").mkdir(parents=True)
    (root / "a b.png").write_bytes(b"inside")
    (root / "below" / "c.png").write_bytes(b"deeper")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "rooted").mkdir()
    (tmp_path / "rooted" / "x").write_bytes(b"secret")
    (root / "link").symlink_to(root / "below" / "c.png")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "way").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    (root / "closed").write_bytes(b"closed")
    return root


def read(root, url, **settings):
    policy = MediaPolicy(local_root=str(root), **settings)
    source = parse(url, policy)
    assert isinstance(source, FileSource)
    return files.read(source, policy)


def test_files_below_the_root_are_read(tree):
    assert read(tree, f"file://{tree}/a%20b.png") == b"inside"
    assert read(tree, f"FILE://localhost{tree}/below/c.png") == b"deeper"
    assert read(tree, f"file://{tree}/below/../a%20b.png") == b"inside"
    assert read(tree, f"file://{tree}/link") == b"deeper"


def test_the_root_may_itself_be_a_link(tree, tmp_path):
    (tmp_path / "alias").symlink_to(tree)
    assert read(tmp_path / "alias", f"file://{tmp_path}/alias/a%20b.png") == b"inside"
    assert read(tmp_path / "alias", f"file://{tree}/a%20b.png") == b"inside"


@pytest.mark.parametrize(
    "path",
    [
        "/missing",
        "",
        "/below",
        "/out",
        "/way/secret",
        "/../secret",
        "/%2e%2e/secret",
        "/below/../../secret",
        "ed/x",
        "/loop",
        "/pipe",
        "/" + "n" * 300,
        "/a b.png/c",
    ],
)
def test_all_else_has_one_message_and_nothing_hangs(tree, path):
    start = time.monotonic()
    with pytest.raises(MediaError) as caught:
        read(tree, f"file://{tree}{path}")
    assert caught.value.message == WORDS
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/zero", "/proc/self/environ", "/nowhere"])
def test_the_rest_of_the_machine_is_out_of_reach(tree, path):
    with pytest.raises(MediaError) as caught:
        read(tree, f"file://{path}")
    assert caught.value.message == WORDS


def test_a_link_that_appears_after_the_check_is_not_followed(tree, tmp_path, monkeypatch):
    """What is opened is checked once more, by its own name."""
    opened = os.open

    def swap(path, *arguments):
        (tree / "below" / "c.png").unlink()
        (tree / "below").rmdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "c.png").write_bytes(b"secret")
        (tree / "below").symlink_to(tmp_path / "elsewhere")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(MediaError, match=WORDS):
        read(tree, f"file://{tree}/below/c.png")


def test_an_unreadable_file_has_the_same_message(tree, monkeypatch):
    def denied(*_):
        raise PermissionError

    monkeypatch.setattr(os, "open", denied)  # as root every mode can be read
    with pytest.raises(MediaError, match=WORDS):
        read(tree, f"file://{tree}/closed")


def test_a_root_that_is_not_there_gives_nothing(tmp_path):
    with pytest.raises(MediaError, match=WORDS):
        read(tmp_path / "none", f"file://{tmp_path}/none/a")


def test_the_byte_limit_is_exact(tree):
    assert read(tree, f"file://{tree}/a%20b.png", max_bytes=6) == b"inside"
    with pytest.raises(TooLargeError, match="limit of 5 bytes"):
        read(tree, f"file://{tree}/a%20b.png", max_bytes=5)


@pytest.mark.parametrize(
    "url", ["file:/a", "file:a", "file://host/a", "file:///a%00b", "file://localhost", "file://", "file://../a"]
)
def test_odd_file_urls_are_refused(url):
    with pytest.raises(MediaError, match=r"file:///PATH"):
        parse(url, MediaPolicy(local_root="/srv"))


def test_long_file_urls_are_refused():
    with pytest.raises(MediaError, match="longer than"):
        parse("file:///" + "a" * 9000, MediaPolicy(local_root="/srv"))


def test_without_a_root_there_are_no_files_and_no_redirect_leads_to_one():
    with pytest.raises(MediaError, match="file paths and bare base64 are not accepted"):
        parse("file:///etc/passwd", MediaPolicy())
    policy = MediaPolicy(local_root="/etc")
    with pytest.raises(MediaError, match="one of http://, https://, data:, file://;"):
        parse("/etc/passwd", policy)
    with pytest.raises(MediaError, match="a redirect must lead to"):
        join(parse("http://example.com/", policy), "file:///etc/passwd", policy)
