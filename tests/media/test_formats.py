"""Formats that need more than Pillow has everywhere, and what tells formats apart."""

from __future__ import annotations

import io
import sys

import numpy as np
import pillow_heif
import pytest
from PIL import Image, features

from pixelgate.errors import DecodeError, TooLargeError
from pixelgate.media import decode as decoder
from pixelgate.media import formats
from pixelgate.media.policy import MediaPolicy

POLICY = MediaPolicy()
STRIPES = np.repeat(np.repeat(np.arange(24, dtype=np.uint8).reshape(4, 6), 8, 0), 8, 1)
RGB = np.stack([STRIPES * 10, 255 - STRIPES * 10, STRIPES * 5], 2)  # smooth enough for lossy formats
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a[::-1].transpose(1, 0, 2),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a[:, ::-1].transpose(1, 0, 2),
}


def encoded(kind, array=RGB, orientation=None):
    """A picture that decodes to nearly ``array`` before it is turned."""
    image = Image.fromarray(array)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    file = io.BytesIO()
    if kind == "AVIF":
        image.save(file, "AVIF", quality=100, subsampling="4:4:4", exif=exif.tobytes())
    else:
        heif = pillow_heif.from_pillow(image)
        heif.save(file, quality=-1, chroma=444, matrix_coefficients=0, exif=exif.tobytes())
    return file.getvalue()


@pytest.mark.parametrize("kind", ["AVIF", "HEIC"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_they_are_decoded_upright(kind, orientation):
    data = encoded(kind, orientation=orientation)
    expected = UPRIGHT[orientation or 1](RGB).astype(int)
    found = decoder.decode(data, POLICY)
    assert np.abs(found - expected).max() <= 3  # the encoders' colour spaces
    header = decoder.header(data, POLICY)
    assert (header.height, header.width, header.format) == (*expected.shape[:2], kind)


@pytest.mark.parametrize("kind", ["AVIF", "HEIC"])
def test_their_transparency_lies_on_the_background(kind):
    alpha = np.zeros((*RGB.shape[:2], 1), np.uint8)
    data = encoded(kind, np.concatenate([RGB, alpha], 2))
    assert (decoder.decode(data, POLICY) == 255).all()
    assert (decoder.decode(data, MediaPolicy(background="#102030")) == (16, 32, 48)).all()


@pytest.mark.parametrize("kind", ["AVIF", "HEIC"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_cut_ones_are_refused(kind, share):
    data = encoded(kind)
    with pytest.raises(DecodeError, match=f"the {kind} picture is damaged"):
        decoder.decode(data[: int(len(data) * share)], POLICY)


@pytest.mark.parametrize("kind", ["AVIF", "HEIC"])
def test_limits_hold_for_them(kind):
    for call in (decoder.header, decoder.decode):
        with pytest.raises(TooLargeError, match="pixels"):
            call(encoded(kind), MediaPolicy(max_pixels=RGB.shape[0] * RGB.shape[1] - 1))
        with pytest.raises(DecodeError, match=rf"\(PNG\): this is {kind}"):
            call(encoded(kind), MediaPolicy(formats=("PNG",)))


def test_transformers_torchvision_backend_knows_neither():
    policy = MediaPolicy(rgb="hf")
    for kind in ("AVIF", "HEIC"):
        data = encoded(kind, orientation=6)
        assert np.array_equal(decoder.decode(data, policy), decoder.decode(data, POLICY))


def test_without_the_extra_heic_is_refused_by_its_name(monkeypatch):
    data = encoded("HEIC")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for call in (decoder.header, decoder.decode):
        with pytest.raises(DecodeError, match=r"HEIC pictures .* pixelgate\[heif\] is not installed"):
            call(data, POLICY)


def test_a_pillow_without_avif_is_named(monkeypatch):
    data = encoded("AVIF")
    monkeypatch.setattr(features, "check", lambda name: False)
    with pytest.raises(DecodeError, match="Pillow was built without AVIF"):
        decoder.decode(data, POLICY)


def test_the_readers_version_is_part_of_a_pictures_identity(monkeypatch):
    assert (f"pillow-heif {pillow_heif.__version__}",) == formats.VERSIONS

    def missing(name):
        raise formats.metadata.PackageNotFoundError

    monkeypatch.setattr(formats.metadata, "version", missing)
    assert formats._versions() == ()


@pytest.mark.parametrize(
    ("brands", "kind"),
    [
        (b"avif....mif1miaf", "AVIF"),
        (b"avis....avifmsf1", "AVIF"),
        (b"mif1....avifmiaf", "AVIF"),
        (b"mif1....heicmiaf", "HEIC"),
        (b"mif1....", "HEIC"),
        (b"heic....mif1heic", "HEIC"),
        (b"heix....", "HEIC"),
        (b"isom....avc1mp41", "MP4"),
        (b"qt  ....", "MP4"),
    ],
)
def test_files_in_boxes_are_told_apart_by_their_brands(brands, kind):
    data = (8 + len(brands)).to_bytes(4) + b"ftyp" + brands
    assert formats.sniff(data + bytes(100)) == kind
    assert formats.sniff(data[:12]) in (kind, "HEIC")  # cut before the compatible brands


def test_broken_boxes_are_told_in_our_words():
    for kind in (b"heic", b"avif"):
        data = b"\0\0\0\x18ftyp" + kind + b"\0\0\0\0"
        for call in (decoder.header, decoder.decode):
            with pytest.raises(DecodeError, match=f"the {kind.decode().upper()} picture is damaged"):
                call(data, POLICY)


# The background


def test_every_kind_of_transparency_lies_on_the_background():
    policy = MediaPolicy(background="#0a141e")
    colour = (10, 20, 30)
    clear = Image.new("RGBA", (5, 4), (200, 100, 50, 0))
    half = Image.new("RGBA", (5, 4), (210, 120, 130, 128))
    palette = Image.new("P", (5, 4), 0)
    palette.putpalette([250, 0, 0, 0, 250, 0])

    def png(image, **options):
        file = io.BytesIO()
        image.save(file, "PNG", **options)
        return file.getvalue()

    for image, options in (
        (clear, {}),
        (Image.new("LA", (5, 4), (90, 0)), {}),
        (palette, {"transparency": 0}),
        (Image.new("RGB", (5, 4), (1, 2, 3)), {"transparency": (1, 2, 3)}),
        (Image.new("I;16", (5, 4), 700), {"transparency": 700}),
    ):
        assert (decoder.decode(png(image, **options), policy) == colour).all()
    assert (decoder.decode(png(half), policy) == (110, 70, 80)).all()
    assert (decoder.decode(png(half.convert("RGB")), policy) == (210, 120, 130)).all()
    assert (decoder.from_pil(clear, policy)[:, :, :3] == colour).all()
