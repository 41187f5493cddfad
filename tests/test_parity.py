"""The comparison with transformers; a stand-in for it here, the real one in `make ci-full`."""

import sys
from types import ModuleType

import ml_dtypes
import numpy as np
import PIL.Image
import pytest

import pixelgate
from goldens import golden
from pixelgate import cli, parity

CHECKPOINT = golden.CHECKPOINTS / "qwen2_vl"
PHOTO = str(golden.COMMITTED / "images" / "photo.jpg")


@pytest.fixture
def transformers(monkeypatch):
    """A module whose processor answers as told; ``calls`` has what it was asked for."""
    module = ModuleType("transformers")
    module.calls = []
    module.raises = None
    module.outputs = {}

    class Auto:
        @staticmethod
        def from_pretrained(path, *, backend, **options):
            module.calls.append((path, backend, options))
            if module.outputs is None:
                raise OSError("no such file")

            def call(self, images, return_tensors, **options):
                module.options = options
                if module.raises:
                    raise module.raises
                assert all(isinstance(image, PIL.Image.Image) for image in images)
                assert return_tensors == ("pt" if backend == "torchvision" else "np")
                return module.outputs

            name = "Qwen2VLImageProcessor" + ("Pil" if module.made == "pil" else "")
            return type(name, (), {"__call__": call})()

    module.AutoImageProcessor = Auto
    module.made = "torchvision"
    monkeypatch.setitem(sys.modules, "transformers", module)
    return module


def run(capsys, *arguments):
    status = cli.main(["parity", *map(str, arguments)])
    return status, capsys.readouterr()


def test_equal_arrays_are_said_to_be_equal(transformers, capsys):
    transformers.outputs = dict(pixelgate.load(CHECKPOINT)([PHOTO]))
    status, printed = run(capsys, CHECKPOINT, PHOTO)
    assert status == 0
    assert printed.out.splitlines() == [
        f"equal      pixel_values  float32{list(transformers.outputs['pixel_values'].shape)}",
        "equal      image_grid_thw  int64[1, 3]",
    ]
    assert transformers.calls == [(CHECKPOINT, "torchvision", {})]
    assert transformers.options == {}


def test_options_are_given_to_both(transformers, capsys):
    transformers.outputs = dict(pixelgate.load(CHECKPOINT)([PHOTO], max_pixels=50_000))
    status, _ = run(capsys, CHECKPOINT, PHOTO, "--mm-processor-kwargs", '{"max_pixels": 50000}')
    assert status == 0
    assert transformers.options == {"max_pixels": 50_000}


def test_a_call_that_transformers_refuses_is_said(transformers, capsys):
    transformers.raises = ValueError("floats, please")
    status, printed = run(capsys, CHECKPOINT, PHOTO)
    assert status == 1
    assert printed.err == "pixelgate: transformers refuses what pixelgate takes: floats, please\n"


def test_the_first_difference_its_size_and_its_share_are_said(transformers, capsys):
    transformers.outputs = {name: value.copy() for name, value in pixelgate.load(CHECKPOINT)([PHOTO]).items()}
    transformers.outputs["pixel_values"][3, 5] += 2
    transformers.outputs["image_grid_thw"] = transformers.outputs["image_grid_thw"].astype(np.int32)
    status, printed = run(capsys, CHECKPOINT, PHOTO)
    assert status == 1
    pixels, grid = printed.out.splitlines()
    assert pixels.startswith("NOT EQUAL  pixel_values  differs in 1 of ")
    assert "by 2 at most; the first is [3, 5]: " in pixels
    assert grid == "NOT EQUAL  image_grid_thw  is int64[1, 3], but int32[1, 3] in transformers"


def test_arrays_of_one_side_alone_are_differences():
    array = np.zeros(3, np.float32)
    verdicts = parity.compare({"ours": array}, {"theirs": array})
    assert [(v.name, v.equal, v.words) for v in verdicts] == [
        ("theirs", False, "is made by transformers alone"),
        ("ours", False, "is made by pixelgate alone"),
    ]


def test_every_bit_counts():
    zeros = np.zeros(2, ml_dtypes.bfloat16)
    assert [v.equal for v in parity.compare({"x": zeros}, {"x": -zeros})] == [False]
    nan = np.full(2, np.nan, np.float32)
    assert [v.equal for v in parity.compare({"x": nan}, {"x": nan.copy()})] == [True]


def test_pixtral_is_told_what_one_token_covers(transformers, capsys):
    checkpoint = golden.CHECKPOINTS / "mistral3"
    transformers.outputs, transformers.made = dict(pixelgate.load(checkpoint, backend="pil")([PHOTO])), "pil"
    assert run(capsys, checkpoint, PHOTO, "--backend", "pil")[0] == 0
    assert transformers.calls == [(checkpoint, "pil", {"patch_size": 28})]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: setattr(module, "made", "pil"), "no torchvision backend here"),
        (lambda module: setattr(module, "outputs", None), "cannot load the image processor: no such file"),
        (lambda module: delattr(module, "AutoImageProcessor"), "parity needs transformers: pip install"),
    ],
)
def test_a_transformers_that_cannot_compare_is_said(transformers, capsys, change, message):
    change(transformers)
    status, printed = run(capsys, CHECKPOINT, PHOTO)
    assert status == 1
    assert message in printed.err


def test_a_picture_that_pillow_cannot_open_is_said(transformers, capsys):
    status, printed = run(capsys, CHECKPOINT, CHECKPOINT / "config.json")
    assert status == 1
    assert "config.json cannot be opened" in printed.err


def test_code_of_the_checkpoint_is_not_run(capsys):
    status, printed = run(capsys, golden.CHECKPOINTS / "phi3_vision", PHOTO)
    assert status == 1
    assert "code of its own, which pixelgate does not run" in printed.err
