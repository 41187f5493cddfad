"""The library's face: load, the processor's call, plan and decode."""

import ast
import io
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import PIL.Image
import pytest

import pixelgate
from goldens import golden
from pixelgate.errors import (
    CheckpointError,
    DecodeError,
    KernelError,
    MediaError,
    OptionError,
    RequestError,
    TooLargeError,
)

PHOTO = golden.COMMITTED / "images" / "photo.jpg"
CHECKPOINT = golden.CHECKPOINTS / "qwen2_5_vl"


@pytest.fixture(scope="module")
def processor():
    return pixelgate.load(CHECKPOINT)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_every_kind_of_input_gives_the_same_arrays(processor):
    expected = processor(str(PHOTO))
    assert list(expected) == ["pixel_values", "image_grid_thw"]
    for image in (PHOTO, PHOTO.read_bytes(), bytearray(PHOTO.read_bytes()), pixelgate.decode(PHOTO)):
        got = processor(image)
        assert all(same(got[name], expected[name]) for name in expected)
    with PIL.Image.open(PHOTO) as image:
        assert same(processor(image)["pixel_values"], expected["pixel_values"])


def test_a_list_is_the_pictures_one_after_the_other(processor):
    wide = np.random.default_rng(1).integers(0, 256, (60, 200, 3), dtype=np.uint8)
    inputs = processor([PHOTO, wide])
    assert len(inputs) == 2
    assert inputs.token_counts == tuple(plan.tokens for plan in inputs.plans)
    for index, image in enumerate((PHOTO, wide)):
        alone = processor(image)
        part = inputs.per_image(index)
        assert all(same(part[name], alone[name]) for name in alone)
        assert np.shares_memory(part["pixel_values"], inputs["pixel_values"])
    assert inputs["image_grid_thw"].shape == (2, 3)
    assert "2 images" in repr(inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_out_is_written_in_place(processor, dtype):
    expected = processor(PHOTO, dtype=dtype)["pixel_values"]
    out = np.empty_like(expected)
    inputs = processor(PHOTO, out=out, dtype=dtype)
    assert inputs["pixel_values"] is out
    assert same(out, expected)


def test_dtypes_are_roundings_of_what_transformers_returns(processor):
    full = processor(PHOTO)["pixel_values"]
    assert full.dtype == np.float32
    assert same(processor(PHOTO, dtype="bfloat16")["pixel_values"], full.astype(ml_dtypes.bfloat16))
    assert same(processor(PHOTO, dtype="float16")["pixel_values"], full.astype(np.float16))


def test_out_and_dtype_are_checked(processor):
    with pytest.raises(KernelError, match="out must be an array float32"):
        processor(PHOTO, out=np.empty((3, 3), np.float32))
    with pytest.raises(KernelError, match="out must be an array uint8"):
        processor(PHOTO, out=np.empty(processor(PHOTO)["pixel_values"].shape, np.float32), dtype="uint8")
    with pytest.raises(OptionError, match="float64"):
        processor(PHOTO, dtype="float64")
    with pytest.raises(OptionError, match="at least one"):
        processor([])


def test_out_may_not_share_memory_with_any_picture(processor):
    rows = processor.plan(height=56, width=84).shape[0]
    out = np.zeros((2 * rows, 1176), np.uint8)
    inside = out[:rows].reshape(-1)[: 56 * 84 * 3].reshape(56, 84, 3)
    with pytest.raises(KernelError, match="shares memory"):
        processor([np.zeros((56, 84, 3), np.uint8), inside], dtype="uint8", out=out)
    with pytest.raises(KernelError, match="list"):
        processor(inside, out=[1])


def test_errors_say_which_picture(processor):
    with pytest.raises(DecodeError) as caught:
        processor([PHOTO, b"no picture"])
    assert caught.value.param == "images[1]"


def test_arrays_with_odd_strides_are_taken(processor):
    image = np.random.default_rng(4).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    for odd in (image[::-1], image[:, ::-1], image[:1][::-1], image[:, :1][:, ::-1], np.asfortranarray(image)):
        expected = processor(np.array(odd.tolist(), np.uint8))["pixel_values"]
        assert same(processor(odd)["pixel_values"], expected)


def test_a_processor_is_named_in_short(processor):
    assert repr(processor) == f"Processor({str(CHECKPOINT)!r}, backend='torchvision', rgb='pixelgate')"


def test_options_are_named_by_a_processor(processor):
    assert repr(processor.with_options(max_pixels=5000)).endswith(", max_pixels=5000)")


def test_a_result_and_its_plans_can_be_pickled(processor):
    inputs = processor([PHOTO])
    again = pickle.loads(pickle.dumps(inputs))
    assert again["pixel_values"].tobytes() == inputs["pixel_values"].tobytes()
    assert again.plans == inputs.plans
    assert again.plans[0].aux["image_grid_thw"].tolist() == inputs["image_grid_thw"].tolist()


@pytest.mark.parametrize("images", [None, "2", 1.5])
def test_the_number_of_pictures_must_be_whole(processor, images):
    with pytest.raises(OptionError, match="images_in_sample must be whole numbers"):
        processor.plan(height=9, width=9, images_in_sample=images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": None}, "a checkpoint is a directory or a hub id, not None"),
        ({"checkpoint": ""}, "not ''"),
        ({"policy": 5}, "policy must be a MediaPolicy, not 5"),
        ({"pillow_order": None}, "pillow_order must be one of"),
    ],
)
def test_arguments_of_load_are_checked(arguments, message):
    with pytest.raises(OptionError, match=message):
        pixelgate.load(**{"checkpoint": CHECKPOINT, **arguments})


def test_a_result_that_does_not_fit_into_memory_is_refused(processor):
    with pytest.raises(TooLargeError, match="there is no memory for a result of"):
        processor(PHOTO, size={"shortest_edge": 1 << 36, "longest_edge": 1 << 37})


def test_of_several_pictures_the_wrong_one_is_named(processor):
    with pytest.raises(DecodeError, match=r"^images\[1\]: "):
        processor([PHOTO, b"no picture"])


def test_a_url_is_no_file(processor):
    with pytest.raises(MediaError, match=r"'http://a/b\.png' is a URL, and nothing is fetched here"):
        processor("http://a/b.png")


def test_options_reach_the_family(processor):
    assert processor(PHOTO, max_pixels=20_000).token_counts[0] < processor(PHOTO).token_counts[0]
    with pytest.raises(OptionError, match="max_pixles"):
        processor(PHOTO, max_pixles=20_000)


def test_wrong_pictures_are_refused_in_words(processor, tmp_path):
    with pytest.raises(RequestError, match="NoneType"):
        processor(None)
    with pytest.raises(MediaError, match="uint8"):
        processor(np.zeros((4, 4, 3), np.float32))
    with pytest.raises(MediaError, match="no picture file"):
        processor(tmp_path / "nothing.jpg")
    with pytest.raises(DecodeError):
        processor(b"no picture")


def test_plan_touches_no_pixels(processor):
    plan = processor.plan(height=1080, width=1920)
    assert (plan.tokens, plan.nbytes) == (2691, 2691 * 4 * 1176 * 4)
    assert plan.views[0].resize == (1092, 1932)
    assert processor.plan(height=np.uint16(6000), width=np.uint16(7000)).grid == (1, 236, 276)
    for height, width in ((0, 5), (10**400, 5), (5, -1), ("5", 5), (5.0, 5)):
        with pytest.raises(OptionError, match=r"pixels a side|whole numbers"):
            processor.plan(height=height, width=width)


def test_backends_and_conversions_are_chosen_at_load():
    torchvision, pil = (pixelgate.load(CHECKPOINT, backend=backend)(PHOTO) for backend in ("torchvision", "pil"))
    assert torchvision["pixel_values"].tobytes() != pil["pixel_values"].tobytes()
    turned = golden.COMMITTED / "images" / "turned.jpg"
    with PIL.Image.open(turned) as opened:
        assert pixelgate.load(CHECKPOINT)(opened).plans[0].height == 160
    assert pixelgate.load(CHECKPOINT)(turned).plans[0].height == 240
    clear = golden.COMMITTED / "images" / "clear.png"
    ours, theirs = (pixelgate.load(CHECKPOINT, rgb=rgb)(clear)["pixel_values"] for rgb in ("pixelgate", "hf"))
    assert ours.tobytes() != theirs.tobytes()


def test_pillow_order_is_a_parameter():
    image = np.random.default_rng(2).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    results = {
        pixelgate.load(CHECKPOINT, backend="pil", pillow_order=o)(image)["pixel_values"].tobytes()
        for o in ("13", "12.1")
    }
    assert len(results) == 2


@pytest.mark.parametrize("argument", [{"backend": "cv2"}, {"pillow_order": "9"}, {"rgb": "bgr"}])
def test_unknown_choices_are_refused(argument):
    with pytest.raises(OptionError, match="must be one of"):
        pixelgate.load(CHECKPOINT, **argument)


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        pixelgate.load(tmp_path / "nowhere")


def test_fingerprints_tell_processors_apart():
    ways = [
        pixelgate.load(CHECKPOINT),
        pixelgate.load(CHECKPOINT, backend="pil"),
        pixelgate.load(CHECKPOINT, rgb="hf"),
        pixelgate.load(golden.CHECKPOINTS / "qwen3_vl"),
    ]
    assert len({p.fingerprint for p in ways}) == 4
    assert pixelgate.load(CHECKPOINT).fingerprint == ways[0].fingerprint


def test_decode_takes_bytes_and_paths():
    expected = np.asarray(PIL.Image.open(PHOTO))
    assert same(pixelgate.decode(PHOTO), expected)
    assert same(pixelgate.decode(str(PHOTO)), expected)
    assert same(pixelgate.decode(memoryview(PHOTO.read_bytes())), expected)
    buffer = io.BytesIO()
    PIL.Image.new("RGBA", (2, 2), (9, 9, 9, 0)).save(buffer, "PNG")
    assert (pixelgate.decode(buffer.getvalue()) == 255).all()


HEAVY = (
    "starlette",
    "uvicorn",
    "grpc",
    "aiohttp",
    "jinja2",
    "tokenizers",
    "msgspec",
    "torch",
    "transformers",
    "rapidocr",
)


def test_importing_the_library_imports_nothing_heavy():
    code = "import sys, pixelgate; print(sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(ast.literal_eval(done.stdout)) & set(HEAVY)


def test_the_command_and_the_settings_of_the_gateway_import_no_arrays():
    """What waits beside the workers must cost next to nothing."""
    code = (
        "import sys, pixelgate.cli, pixelgate.gateway.configure; assert 'load' in dir(pixelgate); "
        "assert not hasattr(pixelgate, 'nothing'); print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(ast.literal_eval(done.stdout)) & {"numpy", "PIL", "ml_dtypes", *HEAVY}


def test_the_level_is_read_from_the_environment_once():
    code = "import pixelgate; from pixelgate.pixels import binding; print(binding.default_level())"
    for level, expected in (("portable", "portable"), ("", None)):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PIXELGATE_ISA": level}
        )
        assert expected is None or done.stdout.strip() == expected
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PIXELGATE_ISA": "mmx"})
    assert failed.returncode != 0
    assert "'mmx' is not available" in failed.stderr
