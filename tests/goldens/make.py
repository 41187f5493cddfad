"""Make the committed goldens with the real transformers.

    python tests/goldens/make.py [--out DIR]        (default: tests/goldens/data)

Needs what versions.json names: transformers, torch, torchvision and Pillow; nothing else in this project does.
Writes the pictures, what transformers makes of them with every backend, its placeholder counts, and hashes of
torchvision's resize over random shapes. Pictures come from integer arithmetic, so every run makes the same. What no
transformers has but checkpoints bring along themselves is restated in remote.py.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import PIL
import PIL.Image
import torch
import torchvision
import transformers
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

sys.path.insert(0, str(Path(__file__).parents[1]))

from goldens import golden, remote
from goldens.cases import FLOAT_TABLE, TORCHVISION_FILTERS, resize_cases

BACKENDS = {"torchvision": "", "pil": "Pil"}  # the suffix of transformers' class
NOT_ARGUMENTS = ("image_processor_type", "processor_class")
VIA_PATH = (
    "photo.jpg",
    "turned.jpg",
    "clear.png",
    "palette.png",
    "grey_alpha.png",
    "cmyk.jpg",
    "progressive.jpg",
    "grey.webp",
)
THREE = ["photo.jpg", "tall.png", "clear.png"]
BATCHES = {"batch_three": THREE, "nested_three": THREE}
COMMON_OPTIONS = (
    {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]},
    {"resample": 2, "rescale_factor": 0.01},
)
NO_RESIZE = {"do_resize": False}
QWEN_OPTIONS = (
    *COMMON_OPTIONS,
    NO_RESIZE,
    {"max_pixels": 20000},
    {"min_pixels": 200000},
    {"size": {"shortest_edge": 90000, "longest_edge": 400000}},
)
# of a call, by family
OPTIONS: dict[str, tuple[dict, ...]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), QWEN_OPTIONS),
    **dict.fromkeys(("llava_next", "llava_onevision"), COMMON_OPTIONS),
    **dict.fromkeys(("llava15_clip", "llava15_pad"), (*COMMON_OPTIONS, NO_RESIZE, {"do_pad": False})),
    **dict.fromkeys(("mistral3", "pixtral"), (*COMMON_OPTIONS, NO_RESIZE, {"size": {"longest_edge": 150}})),
    "llama4": (*COMMON_OPTIONS, {"max_patches": 3}, {"max_patches": 6, "resize_to_max_canvas": True}),
    **dict.fromkeys(("phi3_vision", "phi3_5_vision"), ({"num_crops": 1}, {"num_crops": 9})),
    **dict.fromkeys(("phi4_native", "phi4_remote"), ({"dynamic_hd": 1}, {"dynamic_hd": 7})),
}
OPTIONS_ON = {"do_resize": "whole.png", "resize_to_max_canvas": "narrow.png"}
"""The picture for an option: one of whole patches of every kind, and one whose canvas float64 would not fill."""
SWEEP_SIZES = 400
TOKEN = re.compile(r"<\|\w+\|>|<image>|\[IMG(?:_BREAK|_END)?\]")


def scene(height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [height, width, 3]: slopes, edges and noise, all of it integer arithmetic."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(seed).integers(0, 48, (height, width, 3))
    red = (x * 255 // max(width - 1, 1) + y) % 256
    green = ((x // 17 + y // 11) % 2) * 140 + y * 90 // max(height - 1, 1)
    blue = ((x - width // 2) ** 2 + (y - height // 2) ** 2) // 37 % 256
    return np.clip(np.stack([red, green, blue], -1) + noise - 24, 0, 255).astype(np.uint8)


def pictures(folder: Path) -> None:
    """One file per kind of input that transformers converts in its own way."""
    folder.mkdir(parents=True, exist_ok=True)

    def picture(height: int, width: int, seed: int) -> PIL.Image.Image:
        return PIL.Image.fromarray(scene(height, width, seed))

    picture(300, 420, 1).save(folder / "photo.jpg", quality=88)
    picture(180, 250, 2).save(folder / "progressive.jpg", quality=80, progressive=True, subsampling=0)
    picture(120, 90, 3).convert("CMYK").save(folder / "cmyk.jpg", quality=85)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    picture(160, 240, 4).save(folder / "turned.jpg", quality=85, exif=exif)
    picture(400, 26, 5).save(folder / "tall.png")
    picture(28, 28, 6).save(folder / "one_patch.png")
    picture(448, 672, 19).save(folder / "whole.png")
    picture(104, 13, 20).save(folder / "narrow.png")
    picture(1, 1, 7).save(folder / "dot.png")
    picture(5, 3, 8).save(folder / "tiny.png")
    picture(1, 200, 9).save(folder / "ratio200.png")
    picture(1, 201, 10).save(folder / "ratio201.png")
    picture(448, 448, 11).quantize(64).save(folder / "palette.png", transparency=3)
    picture(130, 110, 12).convert("L").save(folder / "grey.webp", quality=70)
    picture(90, 70, 13).convert("1").save(folder / "bilevel.png")
    clear = picture(120, 200, 14).convert("RGBA")
    clear.putalpha(PIL.Image.fromarray(scene(120, 200, 15)[:, :, 0]))
    clear.save(folder / "clear.png")
    grey_alpha = picture(60, 100, 16).convert("LA")
    grey_alpha.putalpha(PIL.Image.fromarray(scene(60, 100, 17)[:, :, 1]))
    grey_alpha.save(folder / "grey_alpha.png")
    deep = np.random.default_rng(18).integers(0, 1 << 16, (50, 80), dtype=np.uint16)
    PIL.Image.fromarray(deep).save(folder / "deep.png")


def rows(images: Path, family: str) -> Iterator[tuple[str, dict]]:
    for path in sorted(images.iterdir()):
        yield path.name, {}
    for name in VIA_PATH:
        yield f"{name}.viapath", {}
    for name, files in BATCHES.items():
        yield name, {"images": files}
    for number, options in enumerate(OPTIONS[family]):
        file = next((OPTIONS_ON[name] for name in options if name in OPTIONS_ON), "photo.jpg")
        yield f"options_{number}", {"images": [file], "options": options}
        if "image_mean" in options:  # several pictures of a sample may be padded with it
            yield "nested_options", {"images": THREE, "options": options}


def processors(checkpoint: Path, **options) -> dict:
    """By backend; where a checkpoint brings its own code, that is the only one, and ``options`` are its to take."""
    config = golden.read_json(checkpoint / "preprocessor_config.json")
    name = config["image_processor_type"].removesuffix("Fast")
    if name in remote.PROCESSORS:
        return {"remote": remote.PROCESSORS[name]({**config, **options})}
    arguments = {name: value for name, value in config.items() if name not in NOT_ARGUMENTS}
    merge = processor_settings(checkpoint).get("spatial_merge_size")
    if merge:  # PixtralProcessor calls its image processor with what one token covers
        arguments["patch_size"] = processor_settings(checkpoint)["patch_size"] * merge
    classes = {backend: getattr(transformers, name + suffix, None) for backend, suffix in BACKENDS.items()}
    return {backend: cls(**arguments) for backend, cls in classes.items() if cls}


def run(processor, images, **options) -> dict[str, np.ndarray]:
    outputs = {}
    if type(processor) in remote.PROCESSORS.values():
        made = processor(images if isinstance(images, list) else [images])
    else:
        made = processor(images, return_tensors="pt", **options)
    for name, value in made.items():
        tensor = torch.as_tensor(value).contiguous()
        if tensor.dtype == torch.bfloat16:
            outputs[name] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            outputs[name] = tensor.numpy()
    return outputs


def processor_settings(checkpoint: Path) -> dict:
    path = checkpoint / "processor_config.json"
    return golden.read_json(path) if path.exists() else {}


def speaker(checkpoint: Path, image_processor):
    """transformers' processor for a checkpoint, without the tokenizer, which replacing placeholders does not need."""
    name = golden.read_json(checkpoint / "preprocessor_config.json")["processor_class"]
    cls = getattr(transformers, name)
    made = object.__new__(cls)
    for parameter in inspect.signature(cls.__init__).parameters.values():
        if parameter.default is not parameter.empty:
            setattr(made, parameter.name, parameter.default)
    for field, value in processor_settings(checkpoint).items():
        setattr(made, field, value)
    made.image_processor = image_processor
    made.image_token = getattr(made, "image_token", "<|image_pad|>")
    if hasattr(made, "pixel_shuffle_ratio"):
        made.downsample_ratio = round(1 / made.pixel_shuffle_ratio**2)
    return made


def replaced(made, outputs: dict[str, np.ndarray]) -> dict:
    """What stands for the first picture: how many of each token, and the hash of them all in order."""
    text = made.replace_image_token({name: torch.as_tensor(view(value)) for name, value in outputs.items()}, 0)
    pieces = TOKEN.findall(text)
    assert "".join(pieces) == text
    return {"counts": dict(Counter(pieces)), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def view(array: np.ndarray) -> np.ndarray:
    """torch takes no bfloat16 from numpy; counting needs only the shape."""
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def resize_hashes() -> dict[str, str]:
    """sha256 of torchvision's antialiased uint8 resize for every case and filter, and of torch's float32 bicubic."""
    hashes = {}
    for name, image, (height, width) in resize_cases():
        # channels last: the contiguous kernel of torch 2.14 refuses 1x1 outputs
        tensor = torch.from_numpy(image).permute(2, 0, 1)
        for kind in TORCHVISION_FILTERS:
            # transformers replaces Pillow's nearest by torchvision's exact one
            mode = InterpolationMode("nearest-exact" if kind == "nearest" else kind)
            # transformers hands over planes, and nearest has kernels of its own for them
            given = tensor.contiguous() if kind == "nearest" else tensor
            out = functional.resize(given, [height, width], mode, antialias=kind != "nearest")
            hashes[f"{name}/{kind}"] = golden.sha256(out.permute(1, 2, 0).contiguous().numpy())
        floats = torch.from_numpy(np.stack([FLOAT_TABLE[c][image[:, :, c]] for c in range(3)]))
        out = torch.nn.functional.interpolate(floats[None], (height, width), mode="bicubic", align_corners=False)
        hashes[f"{name}/bicubic_f32"] = golden.sha256(out[0].numpy())
    return hashes


def sweep(processors: dict) -> dict[str, list]:
    rng = np.random.default_rng(19)
    sizes = [[int(v) for v in np.exp(rng.uniform(0, np.log(6000), 2))] for _ in range(SWEEP_SIZES)]
    result: dict[str, list] = {"sizes": sizes}
    for family, processor in processors.items():
        if not hasattr(processor, "merge_size"):
            continue
        result[family] = []
        for height, width in sizes:
            try:
                patches = processor.get_number_of_image_patches(height, width)
                size = smart_resize(
                    height,
                    width,
                    processor.patch_size * processor.merge_size,
                    processor.size["shortest_edge"],
                    processor.size["longest_edge"],
                )
                assert patches == size[0] * size[1] // processor.patch_size**2
                result[family].append(list(size))
            except ValueError:
                result[family].append(None)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=golden.COMMITTED)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pictures(out / "images")
    index: dict[str, dict] = {}
    tokens: dict[str, dict] = {}
    torchvision_processors = {}
    for checkpoint in sorted(golden.CHECKPOINTS.iterdir()):
        family = checkpoint.name
        for backend, processor in processors(checkpoint).items():
            if backend == "torchvision":
                torchvision_processors[family] = processor
            for name, row in rows(out / "images", family):
                single = not row and not name.endswith(".viapath")
                if backend == "remote" and not (single or name.startswith(("batch", "options"))):
                    continue  # such code is handed opened pictures, and knows no samples
                key = f"{family}/{backend}/{name}"
                images, options = golden.load_input(out, name, row), row.get("options", {})
                try:
                    if backend == "remote" and options:
                        outputs = run(processors(checkpoint, **options)[backend], images)
                    else:
                        outputs = run(processor, images, **options)
                except ValueError as failure:
                    index[key] = {
                        **row,
                        "status": "error",
                        "error": type(failure).__name__,
                        "message": str(failure),
                    }
                else:
                    described = {k: golden.describe(v) for k, v in outputs.items()}
                    index[key] = {**row, "status": "ok", "outputs": described}
                    path = out / f"{key}.npz"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    np.savez_compressed(path, **golden.pack(outputs))
                    if single and "num_img_tokens" in outputs:
                        tokens[f"{family}/{name}"] = {"counts": {"<image>": int(outputs["num_img_tokens"][0])}}
                    elif single and backend == "torchvision":
                        tokens[f"{family}/{name}"] = replaced(speaker(checkpoint, processor), outputs)
    tokens["__sweep__"] = sweep(torchvision_processors)
    versions = {
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    for name, value in (
        ("index", index),
        ("tokens", tokens),
        ("resize", resize_hashes()),
        ("versions", versions),
    ):
        indent = None if name == "tokens" else 1
        (out / f"{name}.json").write_text(json.dumps(value, indent=indent) + "\n")
    errors = sum(row["status"] == "error" for row in index.values())
    print(f"{len(index)} rows, {errors} of them errors, {len(tokens) - 1} token counts")


if __name__ == "__main__":
    main()
