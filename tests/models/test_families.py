"""What holds for every family, and what only some of them know."""

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pixelgate
from goldens import golden
from models.conftest import family_of
from pixelgate.errors import CheckpointError, ImageRefusedError, KernelError, OptionError, RequestError
from pixelgate.models.family import supported
from pixelgate.models.llama4 import fitted

NAMES = tuple(sorted(path.name for path in golden.CHECKPOINTS.iterdir()))
PICTURES = [
    np.random.default_rng(n).integers(0, 256, (*size, 3), np.uint8) for n, size in enumerate([(40, 90), (700, 500)])
]
sides = st.integers(1, 3000)


@pytest.fixture(scope="module")
def families():
    return {name: family_of(name) for name in NAMES}


@settings(max_examples=60)
@given(sides, sides, st.integers(1, 3))
def test_a_plan_and_its_expansion_count_the_same_tokens(families, height, width, together):
    for family in families.values():
        try:
            plan = family.plan(height, width, images_in_sample=together)
        except ImageRefusedError:
            continue
        counted = sum(count for token, count in family.expansion(plan) if token == family.embedded)
        assert plan.tokens == counted > 0


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_batch_are_the_pictures_alone(name):
    processor = pixelgate.load(golden.CHECKPOINTS / name)
    together = processor(PICTURES)
    for index, picture in enumerate(PICTURES):
        alone = processor(picture).per_image(0)
        part = together.per_image(index)
        assert set(part) == set(alone)
        for output, value in alone.items():
            assert part[output].dtype == value.dtype
            assert part[output].shape == value.shape
            assert part[output].tobytes() == value.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_engine_tensors_hold_every_picture(name):
    processor = pixelgate.load(golden.CHECKPOINTS / name)
    inputs = processor(PICTURES)
    pixels = [inputs.per_image(index)[processor.family.pixels_name] for index in range(len(PICTURES))]
    tensors = processor.family.tensors(inputs.plans, pixels)
    assert all(len(tensor.parts) == len(PICTURES) for tensor in tensors)
    assert tensors[0].name == processor.family.pixels_name
    for part, own in zip(tensors[0].parts, pixels, strict=True):
        rows = part.reshape(-1, *own.shape[1:])
        assert rows[: len(own)].tobytes() == own.tobytes()
        assert not rows[len(own) :].any()


@pytest.mark.parametrize(
    ("name", "height", "width", "words"),
    [
        ("llava15_clip", 335, 400, "must cover the crop of 336x336; this one is 400x335"),
        ("llava15_pad", 300, 200, "must cover the crop"),
        ("pixtral", 32, 40, "multiples of 16, not 40x32"),
        ("mistral3", 32, 28, "multiples of 28, not 28x32"),
    ],
)
def test_what_cannot_be_left_at_its_size_is_refused(name, height, width, words):
    processor = pixelgate.load(golden.CHECKPOINTS / name).with_options(do_resize=False)
    with pytest.raises(ImageRefusedError, match=words):
        processor.plan(height=height, width=width)


def test_options_change_the_batch_too():
    processor = pixelgate.load(golden.CHECKPOINTS / "phi3_5_vision")
    assert processor(PICTURES, num_crops=1)["pixel_values"].shape == (2, 2, 3, 336, 336)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused(name):
    with pytest.raises(OptionError, match="unknown option 'colour'; this processor knows"):
        pixelgate.load(golden.CHECKPOINTS / name).plan(height=10, width=10, colour="red")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "changes",
    [
        {"do_rescale": False},
        {"do_rescale": None},  # off, in transformers
        {"do_convert_rgb": None},
        {"resample": 9},
        {"image_std": [0, 1, 1]},
        {"image_std": None},
        {"image_mean": [float("nan"), 0.5, 0.5]},
        {"rescale_factor": float("inf")},
        {"tint": 5},
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(altered, name, changes):
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        family_of(altered(of=name, **changes))


@pytest.mark.parametrize(
    ("name", "file", "changes"),
    [
        ("llava15_clip", "preprocessor_config.json", {"crop_size": 400}),
        ("llava15_clip", "preprocessor_config.json", {"do_center_crop": False}),
        ("llava15_clip", "preprocessor_config.json", {"do_center_crop": None}),
        ("llava15_clip", "preprocessor_config.json", {"size": 336, "default_to_square": True}),
        ("llava15_clip", "preprocessor_config.json", {"use_square_size": True}),
        ("llava15_clip", "processor_config.json", {"num_additional_image_tokens": None}),
        ("llava15_clip", "processor_config.json", {"num_additional_image_tokens": "1"}),
        ("llava15_pad", "preprocessor_config.json", {"image_mean": [-0.1, 0.5, 0.5]}),
        ("llava_onevision", "preprocessor_config.json", {"image_mean": [1.1, 0.5, 0.5]}),
        ("llava_onevision", "preprocessor_config.json", {"size": {"height": 384, "width": 192}}),
        ("llava_onevision", "processor_config.json", {"vision_aspect_ratio": "anyres_max_0"}),
        ("llava_onevision", "processor_config.json", {"vision_aspect_ratio": None}),
        ("llama4", "preprocessor_config.json", {"size": 336, "default_to_square": False}),
        ("llama4", "processor_config.json", {"pixel_shuffle_ratio": 0}),
        ("llama4", "processor_config.json", {"patch_size": 300}),
        ("mistral3", "processor_config.json", {"patch_size": "absent"}),  # 16 in transformers then
        ("llava15_clip", "preprocessor_config.json", {"size": {"shortest_edge": 336, "longest_edge": 3}}),
        ("llava15_clip", "processor_config.json", {"vision_feature_select_strategy": "some"}),
        ("llava15_clip", "processor_config.json", {"patch_size": "14"}),
        ("llava15_clip", "config.json", {"image_token_index": "absent", "image_token_id": "absent"}),
        ("llava_next", "preprocessor_config.json", {"crop_size": 224}),
        ("llava_next", "preprocessor_config.json", {"image_grid_pinpoints": []}),
        ("llava_next", "preprocessor_config.json", {"image_grid_pinpoints": [[336, 500]]}),
        ("llava_next", "preprocessor_config.json", {"aspect_ratio_setting": "square"}),
        ("llava_onevision", "processor_config.json", {"num_image_tokens": 728}),
        ("llava_onevision", "processor_config.json", {"vision_feature_select_strategy": "some"}),
        ("llava_onevision", "processor_config.json", {"vision_aspect_ratio": "square"}),
        ("llama4", "preprocessor_config.json", {"size": {"height": 336, "width": 300}}),
        ("mistral3", "processor_config.json", {"patch_size": 16}),
        ("mistral3", "config.json", {"spatial_merge_size": 3}),
        ("pixtral", "preprocessor_config.json", {"size": {"shortest_edge": 5}}),
        ("phi3_vision", "preprocessor_config.json", {"num_img_tokens": 100}),
        ("phi4_native", "preprocessor_config.json", {"size": {"height": 448, "width": 300}}),
        ("phi4_native", "preprocessor_config.json", {"patch_size": 28}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(altered, name, file, changes):
    with pytest.raises(CheckpointError):
        family_of(altered(file, of=name, **changes))


def test_an_unknown_model_type_names_what_is_supported(altered):
    with pytest.raises(CheckpointError, match="qwen2_5_vl, qwen2_vl, qwen3_vl"):
        family_of(altered("config.json", model_type="resnet"))
    assert {"llama4", "llava", "llava_next", "llava_onevision", "mistral3", "pixtral"} < set(supported())


@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_pixtral_as_transformers_saves_it_has_do_pad(altered, name):
    family = family_of(name)
    assert family_of(altered("preprocessor_config.json", of=name, do_pad=True)) == family


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phi4_remote", {"image_mean": [0.1, 0.5, 0.5]}),
        ("phi4_remote", {"image_std": [0.1, 0.5, 0.5]}),
        ("phi4_remote", {"rescale_factor": 0.01}),
        ("phi4_remote", {"size": 224, "patch_size": 7}),
        ("phi3_vision", {"rescale_factor": 0.01}),
    ],
)
def test_what_a_checkpoints_own_code_would_not_heed_is_refused(altered, name, changes):
    with pytest.raises(CheckpointError, match=list(changes)[-1]):
        family_of(altered(of=name, **changes))


@pytest.mark.parametrize(("name", "value"), [("qwen2_5_vl", None), ("qwen2_5_vl", 3), ("llava15_clip", [3])])
def test_a_vision_config_that_is_no_object(altered, name, value):
    path = altered("config.json", of=name, vision_config=value)
    if value is None:  # as if it were not there
        assert family_of(path) == family_of(name)
    else:
        with pytest.raises(CheckpointError, match=r"vision_config of config\.json must be an object"):
            family_of(path)


def test_onevision_pads_with_the_checkpoints_mean_whatever_a_call_says():
    processor = pixelgate.load(golden.CHECKPOINTS / "llava_onevision")
    plan = processor.plan(height=10, width=20, images_in_sample=2, image_mean=[0.9, 0.5, 0.1])
    assert plan.views[0].pre_pad.fill == processor.plan(height=10, width=20, images_in_sample=2).views[0].pre_pad.fill


def test_pixtrals_patch_may_be_that_of_a_token(altered):
    family = family_of("mistral3")
    assert family_of(altered("preprocessor_config.json", of="mistral3", patch_size=28)) == family


def test_an_image_processor_of_another_model_is_refused(altered):
    with pytest.raises(CheckpointError, match="CLIPImageProcessor, LlavaImageProcessor, PixtralImageProcessor"):
        family_of(altered(of="llava15_clip", image_processor_type="ViTImageProcessor"))


def test_a_missing_class_is_no_question_where_there_is_only_one(altered):
    assert family_of(altered(image_processor_type="absent")).plan(56, 56).tokens == 4


def test_a_missing_class_is_refused_where_there_are_several(altered):
    with pytest.raises(CheckpointError, match="has no image_processor_type"):
        family_of(altered(of="llava15_clip", image_processor_type="absent"))


def test_a_backend_that_transformers_does_not_have_is_refused():
    with pytest.raises(CheckpointError, match="Llama4ImageProcessor has no backend 'pil', only torchvision"):
        pixelgate.load(golden.CHECKPOINTS / "llama4", backend="pil")
    with pytest.raises(CheckpointError, match="Phi3VImageProcessor has no backend 'torchvision', only remote"):
        pixelgate.load(golden.CHECKPOINTS / "phi3_vision", backend="torchvision")
    assert pixelgate.load(golden.CHECKPOINTS / "phi3_vision").backend == "remote"


def test_a_size_of_one_number_is_what_the_class_makes_of_it(altered):
    assert family_of(altered(of="llava15_clip", size=336)).shortest_edge == 336


def test_null_is_missing_where_transformers_takes_it_so(altered):
    assert not family_of(altered(of="llava15_pad", do_pad=None)).pad_to_square


def test_llama4_scales_by_a_canvas_in_float32_and_by_a_pictures_own_side_in_float64():
    assert fitted(104, 13, np.float32(2016), np.float32(336)) == (2016, 252)
    assert fitted(104, 13, 2016, 336) == (2016, 251)


def test_llama4_shuffles_by_the_checkpoints_ratio(altered):
    path = altered("processor_config.json", of="llama4", pixel_shuffle_ratio=1.0)
    assert family_of(path).tile_tokens == 576


def test_only_the_class_that_pads_pads(altered):
    assert family_of("llava15_pad").pad_to_square
    assert not family_of(altered(of="llava15_pad", image_processor_type="CLIPImageProcessor")).pad_to_square


def test_an_intermediate_beyond_bounds_is_refused_before_it_is_made():
    with pytest.raises(ImageRefusedError, match="201600x336"):
        family_of("llava15_clip").plan(1, 600)
    with pytest.raises(ImageRefusedError, match="too narrow"):
        family_of("pixtral").plan(1, 5000)
    with pytest.raises(ImageRefusedError, match="too narrow"):
        family_of("phi3_5_vision").plan(1, 2000)


def test_pictures_of_one_sample_are_not_tiled_by_onevision():
    processor = pixelgate.load(golden.CHECKPOINTS / "llava_onevision")
    apart, together = processor(PICTURES), processor([PICTURES])
    assert together["pixel_values"].shape == (2, 1, 3, 384, 384)
    assert together.token_counts == (730, 730)
    assert together["batch_num_images"].tolist() == [2]
    assert apart["batch_num_images"].tolist() == [1, 1]
    assert apart["pixel_values"].shape[1] > 1
    assert processor.plan(height=40, width=90, images_in_sample=2).tokens == 730


def test_pictures_and_lists_of_pictures_do_not_mix():
    processor = pixelgate.load(golden.CHECKPOINTS / "llava15_clip")
    with pytest.raises(RequestError, match="not both"):
        processor([PICTURES[0], PICTURES])


@pytest.mark.parametrize("name", ["llava_next", "pixtral"])
def test_gaps_hold_zero_in_any_memory_and_have_no_uint8(name):
    processor = pixelgate.load(golden.CHECKPOINTS / name)
    expected = processor(PICTURES)["pixel_values"]
    out = np.full_like(expected, 7)
    assert processor(PICTURES, out=out)["pixel_values"].tobytes() == expected.tobytes()
    assert not expected[0, :, -1, -1].any() if name == "pixtral" else not expected[0, -1].any()
    with pytest.raises(OptionError, match="gaps"):
        processor(PICTURES, dtype="uint8")
    assert processor(PICTURES[:1], dtype="uint8")["pixel_values"].dtype == np.uint8


def test_only_code_that_drops_alpha_drops_it_and_only_when_asked():
    clear = PIL.Image.new("RGBA", (50, 60), (10, 20, 30, 0))
    palette = clear.convert("RGB").quantize(4)
    palette.info["transparency"] = bytes([0, 0, 0, 0])
    for image in (clear, palette):
        for name, rgb, expected in (
            ("phi4_remote", "hf", (10, 20, 30)),
            ("phi4_remote", "pixelgate", (255, 255, 255)),
            ("phi3_vision", "hf", (255, 255, 255)),
        ):
            processor = pixelgate.load(golden.CHECKPOINTS / name, rgb=rgb)
            assert tuple(processor.rgb(image)[0, 0, :3]) == expected
    assert palette.info["transparency"] == bytes([0, 0, 0, 0])


def test_phi_turns_upright_pictures_over_their_diagonal():
    family = family_of("phi3_5_vision")
    wide, upright = family.plan(300, 500), family.plan(500, 300)
    assert wide.views[1].resize == upright.views[1].resize[::-1]
    assert not wide.views[1].transpose
    assert upright.views[1].transpose
    assert family.plan(100, 100).tokens == 757


def test_phi4_counts_no_tokens_for_what_is_beside_the_picture():
    family = family_of("phi4_native")
    assert family.plan(448, 448).tokens == 256 + 16 + 1 + 256 + 16
    assert family.plan(896, 448).tokens == family.plan(448, 448).tokens + 256 + 16
    assert family.plan(449, 448).tokens == family.plan(448, 448).tokens + 16 + 1  # a second tile, one row of it
    with pytest.raises(ImageRefusedError, match="1x200 is too narrow"):
        family.plan(200, 1)


def test_canvases_of_up_to_36_tiles_when_the_picture_is_larger():
    family = family_of("phi4_remote")
    assert family.plan(6000, 6000).aux["image_sizes"].tolist() == [[2688, 2688]]
    assert family.plan(200, 20000).aux["image_sizes"].tolist() == [[448, 448 * 36]]


def test_tiles_made_of_floats_have_no_uint8():
    for name in ("phi4_native", "phi3_vision"):
        with pytest.raises(OptionError, match="normalised floats"):
            pixelgate.load(golden.CHECKPOINTS / name)(PICTURES[1], dtype="uint8")


def test_read_only_memory_is_refused_before_the_gaps_are_filled():
    processor = pixelgate.load(golden.CHECKPOINTS / "phi3_vision")
    out = np.empty_like(processor(PICTURES[0])["pixel_values"])
    out.flags.writeable = False
    with pytest.raises(KernelError, match="read-only"):
        processor(PICTURES[0], out=out)


def test_plans_of_one_size_are_the_same_and_can_be_kept_in_a_dictionary():
    for name in NAMES:
        family = family_of(name)
        assert len({family.plan(300, 500), family.plan(300, 500), family.plan(500, 300)}) == 2


def test_a_sample_has_at_least_the_picture_itself():
    with pytest.raises(OptionError, match="images_in_sample"):
        pixelgate.load(golden.CHECKPOINTS / "llava_onevision").plan(height=5, width=5, images_in_sample=0)


def test_llama4_is_bfloat16_and_its_separators_are_in_order():
    processor = pixelgate.load(golden.CHECKPOINTS / "llama4")
    inputs = processor(PICTURES[1])
    assert inputs["pixel_values"].dtype.name == "bfloat16"
    tokens = [token for token, _ in processor.family.expansion(processor.plan(height=300, width=600))]
    assert tokens == [
        "<|image_start|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|patch|>",
        "<|tile_y_separator|>",
        "<|image|>",
        "<|patch|>",
        "<|image_end|>",
    ]
