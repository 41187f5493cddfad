"""Qwen-VL's arithmetic and its settings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pixelgate
from goldens import golden
from models.conftest import family_of
from pixelgate.errors import CheckpointError, ImageRefusedError, OptionError
from pixelgate.models.qwen_vl import smart_resize

CHECKPOINTS = golden.CHECKPOINTS


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1080, 1920), (1092, 1932)),
        ((480, 640), (476, 644)),
        ((70, 70), (56, 56)),  # 70 / 28 is 2.5: half goes to even
        ((1, 1), (56, 56)),
        ((1, 200), (28, 812)),
        ((9000, 6000), (4368, 2912)),
    ],
)
def test_sizes_snap_to_merged_patches_within_the_bounds(size, expected):
    assert smart_resize(*size, factor=28, min_pixels=3136, max_pixels=12845056) == expected


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_every_accepted_size_gives_whole_blocks(height, width):
    family = family_of(CHECKPOINTS / "qwen3_vl")
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageRefusedError):
            family.plan(height, width)
        return
    plan = family.plan(height, width)
    rows, columns = plan.views[0].resize
    assert rows % 32 == columns % 32 == 0
    assert rows * columns <= 16777216
    assert plan.tokens == rows // 32 * (columns // 32)
    assert family.expansion(plan) == [("<|image_pad|>", plan.tokens)]
    assert plan.shape == (rows // 16 * (columns // 16), 1536)
    assert plan.aux["image_grid_thw"].tolist() == [list(plan.grid)]


def test_the_ratio_of_exactly_200_is_allowed_and_more_is_not():
    family = family_of(CHECKPOINTS / "qwen2_vl")
    assert family.plan(1, 200).tokens == 29
    with pytest.raises(ImageRefusedError, match="201") as caught:
        family.plan(201, 1)
    assert caught.value.status == 422


def test_options_override_the_bounds_of_one_call():
    processor = pixelgate.load(CHECKPOINTS / "qwen2_5_vl")
    large, small = {"height": 1080, "width": 1920}, {"height": 10, "width": 10}
    assert processor.plan(**large, max_pixels=500_000).tokens < 640 < processor.plan(**large).tokens
    assert processor.plan(**small, min_pixels=100_000).tokens >= 127


def test_a_size_given_to_the_call_replaces_the_older_spelling_in_the_checkpoint():
    processor = pixelgate.load(CHECKPOINTS / "qwen2_5_vl")
    size = {"shortest_edge": 10_000, "longest_edge": 50_000}
    assert processor.with_options(size=size).family.max_pixels == 50_000
    both = processor.with_options(size=size, max_pixels=40_000)
    assert (both.family.min_pixels, both.family.max_pixels) == (10_000, 40_000)
    assert processor.with_options(max_pixels=40_000).with_options(size=size).family.max_pixels == 50_000


def test_options_are_kept_as_they_were_given():
    mean = [0.1, 0.2, 0.3]
    processor = pixelgate.load(CHECKPOINTS / "qwen2_5_vl").with_options(image_mean=mean)
    mean[0] = 0.9
    assert processor.with_options(max_pixels=50_000).family.steps.affine.mean == (0.1, 0.2, 0.3)


def test_options_can_be_given_one_after_the_other():
    processor = pixelgate.load(CHECKPOINTS / "qwen2_5_vl").with_options(min_pixels=5_000)
    family = processor.with_options(max_pixels=10_000).family
    assert (family.min_pixels, family.max_pixels) == (5_000, 10_000)
    assert processor.with_options() is processor


def test_without_do_resize_a_picture_must_be_whole_patches():
    processor = pixelgate.load(CHECKPOINTS / "qwen2_5_vl").with_options(do_resize=False)
    assert processor.plan(height=56, width=84).grid == (1, 4, 6)
    with pytest.raises(ImageRefusedError, match="multiples of 28, not 84x57"):
        processor.plan(height=57, width=84)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixel": 5}, "min_pixels, max_pixels"),
        ({"patch_size": 16}, "unknown option 'patch_size'"),
        ({"max_pixels": 0}, "max_pixels .* from 1"),
        ({"max_pixels": True}, "^max_pixels must be int"),
        ({"max_pixels": 2.5}, "^max_pixels must be int"),
        ({"rescale_factor": 10**400}, "rescale_factor must be positive"),
        ({"image_mean": [10**400, 0, 0]}, "image_mean must be three numbers"),
        ({"image_mean": [True, 0, 0]}, "image_mean must be three numbers"),
        ({"size": {"shortest_edge": 10**400, "longest_edge": 5}}, "shortest_edge of size must be from 1"),
        ({"resample": 6}, "by Pillow's numbers: .*2 is bilinear, 3 is bicubic"),
        ({"max_pixels": None}, "max_pixels must have a value"),
        ({"min_pixels": 5, "image_std": [0, 1, 1]}, "image_std"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(OptionError, match=message) as caught:
        pixelgate.load(CHECKPOINTS / "qwen2_5_vl").plan(height=100, width=100, **options)
    assert caught.value.param == list(options)[-1]


def test_engine_tensors_have_their_field_layout():
    family = family_of(CHECKPOINTS / "qwen2_5_vl")
    plans = [family.plan(56, 84), family.plan(28, 112)]
    pixels = [np.zeros(plan.shape, np.uint8) for plan in plans]
    values, grids, rows = family.tensors(plans, pixels)
    assert (values.name, values.field, values.sizes, values.dtype) == (
        "pixel_values",
        "flat",
        "patches_per_image",
        "uint8",
    )
    assert values.shape == (plans[0].shape[0] + plans[1].shape[0], 1176)
    assert values.nbytes == sum(p.nbytes for p in pixels)
    assert (grids.name, grids.field, grids.keep_on_cpu) == ("image_grid_thw", "batched", True)
    assert grids.joined().tolist() == [[1, 4, 6], [1, 2, 8]]
    assert (rows.name, rows.field) == ("patches_per_image", "batched")
    assert rows.joined().tolist() == [24, 16]
    assert values.parts[0] is pixels[0]


@pytest.mark.parametrize("field", ["do_rescale", "do_normalize", "do_convert_rgb"])
def test_switched_off_steps_are_refused(altered, field):
    with pytest.raises(CheckpointError, match=field):
        family_of(altered(**{field: False}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_size": 7}, "crop_size"),
        ({"patch_size": "14"}, "patch_size"),
        ({"patch_size": 16}, "patch_size"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": 0.5}, "image_mean"),
        ({"resample": 9}, "resample"),
        ({"size": {"height": 3}}, "shortest_edge"),
        ({"size": {"shortest_edge": 3, "longest_edge": 4, "height": 3}}, "height"),
        ({"max_pixels": True}, "max_pixels"),
        ({"max_pixels": 0}, "max_pixels"),
        ({"patch_size": 1025}, "patch_size"),
        ({"merge_size": -2}, "merge_size"),
        ({"temporal_patch_size": 0}, "temporal_patch_size"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"size": {"shortest_edge": 5}}, "longest_edge"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(altered, changes, message):
    with pytest.raises(CheckpointError, match=message):
        family_of(altered(**changes))


def test_every_spelling_of_the_pixel_bounds(altered):
    sizes = {"shortest_edge": 10_000, "longest_edge": 50_000}
    path = altered(min_pixels="absent", max_pixels="absent", size=sizes)
    assert (family_of(path).min_pixels, family_of(path).max_pixels) == (10_000, 50_000)


def test_the_older_spelling_wins_as_in_transformers(altered):
    family = family_of(altered(size={"shortest_edge": 10_000, "longest_edge": 50_000}))
    assert (family.min_pixels, family.max_pixels) == (3136, 12845056)


def test_missing_bounds_are_those_of_transformers_class(altered):
    family = family_of(altered(min_pixels="absent", max_pixels="absent", image_mean="absent", rescale_factor="absent"))
    assert (family.min_pixels, family.max_pixels) == (3136, 1003520)
    assert family.steps.affine.mean[0] == 0.48145466


def test_resample_and_rescale_factor_are_honoured(altered):
    family = family_of(altered(resample=2, rescale_factor=0.5))
    assert family.steps.resample.filter == "bilinear"
    assert family.steps.affine.rescale_factor == 0.5


def test_a_checkpoint_without_the_placeholder_id_is_refused(altered):
    with pytest.raises(CheckpointError, match="image_token_id"):
        family_of(altered("config.json", image_token_id="absent"))
