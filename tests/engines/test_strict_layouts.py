"""The rules for every family's tensors: what a family sends passes, and each mutation is refused for its own reason."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from goldens.tokenizers_of import CHECKPOINTS, SPECIALS
from pixelgate.engines.engine import EngineRequest, Images, Sampling, Span
from pixelgate.engines.vllm_wire import encode, pb
from pixelgate.errors import CheckpointError
from pixelgate.pixels.affine import NUMPY_DTYPES
from pixelgate.processor import load
from pixelgate.testing.strict_layouts import Refused, layout
from pixelgate.testing.strict_rules import Identities, StrictFacts, check

SIZES = ((120, 200), (120, 200))


def facts(family, **settings):
    return StrictFacts.from_checkpoint(CHECKPOINTS / family, vocab_size=210_000, encoder_dtype="bfloat16", **settings)


def message(family, sizes=SIZES):
    processor = load(CHECKPOINTS / family)
    arithmetic = processor.family
    plans = [processor.plan(height=height, width=width) for height, width in sizes]
    pixels = [np.ones(plan.shape, NUMPY_DTYPES["bfloat16"]) for plan in plans]
    ids, spans = [7], []
    for plan in plans:
        runs = [(SPECIALS[family][token], count) for token, count in arithmetic.expansion(plan)]
        spans.append(Span(len(ids), sum(count for _, count in runs)))
        ids += [id_ for id_, count in runs for _ in range(count)]
        ids.append(8)
    images = Images(
        arithmetic.tensors(plans, pixels),
        tuple(spans),
        tuple(f"{i:064x}" for i in range(len(plans))),
        arithmetic.placeholder_id,
        tuple(plans),
    )
    request = EngineRequest("r", tuple(ids), Sampling(max_tokens=1), images)
    return pb.GenerateRequest.FromString(encode(request))


def small(message, name):
    return message.mm_inputs.model_specific_tensors[name]


def put(name, index, value):
    """A mutation: one number of a tensor."""

    def mutate(message):
        tensor = small(message, name)
        values = np.frombuffer(tensor.inline, "<i8" if tensor.dtype == "int64" else "<f4").copy()
        values[index] = value
        tensor.inline = values.tobytes()

    return mutate


def reshape(index, value):
    """A mutation: fewer pixels."""

    def mutate(message):
        pixels = message.mm_inputs.pixel_values
        pixels.shape[index] = value
        pixels.inline = pixels.inline[: 2 * int(np.prod(list(pixels.shape)))]

    return mutate


def swap_ids(first, second):
    def mutate(message):
        ids, start = message.tokenized.input_ids, message.mm_inputs.mm_placeholders[0].offset
        ids[start + first], ids[start + second] = ids[start + second], ids[start + first]

    return mutate


MUTATIONS = [
    ("llava15_clip", reshape(2, 168), "pixel_values has shape"),
    ("llava15_clip", lambda m: m.tokenized.input_ids.__setitem__(3, 8), "holds an id that is no placeholder"),
    ("llava_next", put("image_sizes", 0, 0), "image_sizes has 0x200"),
    ("llava_next", put("image_sizes", 0, 60), "long, its image has"),
    ("llava_next", put("image_sizes", slice(0, 2), [600, 600]), "tiles are too few for 600x600 on 672x672"),
    ("llava_next", lambda m: m.mm_inputs.keep_on_cpu_keys.pop(), r"keep_on_cpu_keys are \[\]"),
    ("llava_onevision", put("image_sizes", 1, 20), "long, its image has"),
    ("llava_onevision", lambda m: m.mm_inputs.batched_keys.pop(0), "batched_keys are"),
    ("llama4", put("aspect_ratios", 0, 3), "tiles are not those of a canvas of 3x1"),
    ("llama4", put("patches_per_image", 0, 2), "2 tiles are not those of a canvas of 1x1"),
    ("llama4", lambda m: m.mm_inputs.flat_keys.clear(), "flat_keys are {}"),
    ("llama4", swap_ids(0, 2), "holds an id that is no placeholder"),
    ("llama4", lambda m: m.tokenized.input_ids.__setitem__(1, 200092), "in the place of another token"),
    ("pixtral", reshape(3, 200), "are no whole patches of 16"),
    ("pixtral", reshape(2, 112), "and 7 other tokens"),
    ("pixtral", swap_ids(12, 13), "holds an id that is no placeholder"),
    ("mistral3", reshape(2, 84), "long, its image has 24 embeddings and 3 other tokens"),
    ("phi3_5_vision", put("image_sizes", 0, 337), "a canvas of 337x"),
    ("phi3_5_vision", put("image_sizes", 0, 336 * 6), "tiles are too few for a canvas of 2016x"),
    ("phi3_5_vision", put("image_sizes", 1, 336), "long, its image has"),
    (
        "phi4_remote",
        lambda m: m.mm_inputs.ClearField("encoder_input_key"),
        "is not set, but the name is input",
    ),
    ("phi4_remote", put("num_img_tokens", 0, 5), "num_img_tokens is 5, but the mask keeps"),
    ("phi4_remote", put("image_attention_mask", slice(1024, 2048), 1), "but the mask keeps"),
    ("phi4_remote", put("image_sizes", 0, 100), "a canvas of 100x448"),
    ("phi4_remote", put("image_sizes", 0, 896), "tiles are too few for a canvas of 896x448"),
    (
        "phi4_native",
        lambda m: small(m, "image_attention_mask").shape.__setitem__(1, 1),
        "has 16384 bytes where",
    ),
]


@pytest.mark.parametrize("family", list(SPECIALS))
def test_what_a_family_sends_passes(family):
    identities, mine = Identities(), facts(family)
    sent = message(family)
    check(sent, mine)
    identities.remember(sent, mine.layout)
    identities.remember(sent, mine.layout)


@pytest.mark.parametrize(("family", "mutate", "reason"), MUTATIONS)
def test_a_mutated_request_is_refused(family, mutate, reason):
    sent = message(family)
    mutate(sent)
    with pytest.raises(Refused, match=reason):
        check(sent, facts(family))


def test_a_mask_for_every_tile():
    sent = message("phi4_remote")
    masks = small(sent, "image_attention_mask")
    masks.shape[1] = 1
    masks.inline = masks.inline[: 4 * int(np.prod(list(masks.shape)))]
    with pytest.raises(Refused, match="1 masks for 2 tiles"):
        check(sent, facts("phi4_remote"))


def test_a_picture_keeps_its_hash_beside_one_with_more_tiles():
    identities, mine = Identities(), facts("llava_next")
    alone, beside = message("llava_next", SIZES[:1]), message("llava_next", (SIZES[0], (900, 300)))
    assert alone.mm_inputs.pixel_values.shape[1] <= beside.mm_inputs.pixel_values.shape[1]
    identities.remember(alone, mine.layout)
    identities.remember(beside, mine.layout)
    changed = message("llava_next", ((121, 200),))
    with pytest.raises(Refused, match="belonged to another picture"):
        identities.remember(changed, mine.layout)


def test_a_checkpoint_must_say_what_the_rules_need(tmp_path):
    with pytest.raises(CheckpointError, match="no rules for model_type 'other'"):
        layout({"model_type": "other"}, {}, {})
    with pytest.raises(CheckpointError, match="does not say its image_size"):
        layout({"model_type": "llava"}, {}, {})
    folder = tmp_path / "llava_next"
    shutil.copytree(CHECKPOINTS / "llava_next", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "image_token_index"}))
    with pytest.raises(CheckpointError, match="does not say its image_token_id"):
        StrictFacts.from_checkpoint(folder, vocab_size=5)
