"""The strict engine's rules: the good request passes, every mutation of it is refused for its own reason."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from engine_requests import BFLOAT16, FACTS, PAD, request
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.vllm_wire import encode
from pixelgate.errors import CheckpointError
from pixelgate.testing.strict_layouts import Refused, patches
from pixelgate.testing.strict_rules import Identities, StrictFacts, check


def message(dtype="uint8", **kwargs):
    return pb.GenerateRequest.FromString(encode(request(dtype, **kwargs)))


def set_int64(tensor, *values, shape=None):
    tensor.inline = np.array(values, "<i8").tobytes()
    if shape:
        tensor.shape[:] = shape


def span(message, index):
    return message.mm_inputs.mm_placeholders[index]


def small(message, name):
    return message.mm_inputs.model_specific_tensors[name]


def drop_mm(message):
    message.ClearField("mm_inputs")


def swap_spans(message):
    first, second = span(message, 0), span(message, 1)
    first.offset, second.offset = second.offset, first.offset
    first.length, second.length = second.length, first.length


def overlap_spans(message):
    span(message, 1).offset = span(message, 0).offset + 1


def beyond_the_end(message):
    del message.tokenized.input_ids[-4:]


def shift_span(message):
    span(message, 0).offset -= 1


def stray_placeholder(position):
    def mutate(message):
        message.tokenized.input_ids[position] = PAD

    return mutate


def double_both_sizes(message):
    """Consistent sizes and spans, but fewer rows than they promise."""
    set_int64(small(message, "image_grid_thw"), 1, 4, 8, 1, 2, 6)
    set_int64(small(message, "patches_per_image"), 32, 12)


MUTATIONS = {
    "request_id is empty": lambda m: m.ClearField("request_id"),
    "the prompt is not token ids": lambda m: setattr(m, "text", "hello"),
    "media_refs is set": lambda m: m.media_refs.items.add(url="https://example.org/a.png"),
    "kv_transfer_params is set": lambda m: setattr(m.kv_transfer_params, "remote_port", 1),
    "kv_transfer_params_json is set": lambda m: setattr(m, "kv_transfer_params_json", "{}"),
    "extra_mm_inputs is set": lambda m: m.extra_mm_inputs.add(),
    "there are no input_ids": lambda m: m.tokenized.ClearField("input_ids"),
    "leave no room in a context of 512": lambda m: m.tokenized.input_ids.extend([1] * 512),
    "input id 1000 is not below": lambda m: m.tokenized.input_ids.__setitem__(0, 1000),
    "sampling_params is missing": lambda m: m.ClearField("sampling_params"),
    "temperature is unset": lambda m: m.sampling_params.ClearField("temperature"),
    "temperature -1.0 is not": lambda m: setattr(m.sampling_params, "temperature", -1),
    "temperature inf is not": lambda m: setattr(m.sampling_params, "temperature", float("inf")),
    "top_p 1.5 is not": lambda m: setattr(m.sampling_params, "top_p", 1.5),
    "min_p -0.5 is not": lambda m: setattr(m.sampling_params, "min_p", -0.5),
    "presence_penalty is not": lambda m: setattr(m.sampling_params, "presence_penalty", 2.5),
    "frequency_penalty is not": lambda m: setattr(m.sampling_params, "frequency_penalty", -2.5),
    "repetition_penalty is not": lambda m: setattr(m.sampling_params, "repetition_penalty", -1),
    "several answers at": lambda m: setattr(m.sampling_params, "n", 2),
    "answers are more than": lambda m: m.sampling_params.MergeFrom(pb.SamplingParams(n=65, temperature=1)),
    "logprobs 21 is not": lambda m: setattr(m.sampling_params, "logprobs", 21),
    "a logit_bias is not": lambda m: m.sampling_params.logit_bias.update({5: 101.0}),
    "the constraint regex is empty": lambda m: setattr(m.sampling_params, "regex", ""),
    "a choice is empty": lambda m: m.sampling_params.choice.choices.extend(["a", ""]),
    "a stop string is empty": lambda m: m.sampling_params.stop.append(""),
    "max_tokens is not 1": lambda m: setattr(m.sampling_params, "max_tokens", 0),
    "min_tokens is greater": lambda m: setattr(m.sampling_params, "min_tokens", 65),
    "mm_inputs is missing": drop_mm,
    "has no placeholder": lambda m: m.mm_inputs.ClearField("mm_placeholders"),
    "4 images are more than 3": lambda m: m.mm_inputs.mm_placeholders.extend([span(m, 1)] * 2),
    "modality is not IMAGE": lambda m: setattr(m.mm_inputs, "modality", common_pb2.VIDEO),
    "encoder_input_key is set": lambda m: setattr(m.mm_inputs, "encoder_input_key", "images"),
    "1 hashes for 2 placeholders": lambda m: m.mm_inputs.mm_hashes.pop(),
    "'ABC' is not 64": lambda m: m.mm_inputs.mm_hashes.__setitem__(0, "ABC"),
    "is not 64 lowercase": lambda m: m.mm_inputs.mm_hashes.__setitem__(0, "A" * 64),
    "tensors are image_grid_thw, image_sizes, patches": lambda m: small(m, "image_sizes").SetInParent(),
    "tensors are patches_per_image": lambda m: m.mm_inputs.model_specific_tensors.pop("image_grid_thw"),
    "pixel_values is missing": lambda m: m.mm_inputs.ClearField("pixel_values"),
    "batched_keys are ['image_grid_thw']": lambda m: m.mm_inputs.batched_keys.pop(),
    "'patches_per_image', 'pixel_values']": lambda m: m.mm_inputs.batched_keys.append("pixel_values"),
    "flat_keys are {}": lambda m: m.mm_inputs.flat_keys.clear(),
    "keep_on_cpu_keys are []": lambda m: m.mm_inputs.keep_on_cpu_keys.pop(),
    "pixel_values has dtype 'float32', not 'uint8'": lambda m: setattr(m.mm_inputs.pixel_values, "dtype", "float32"),
    "pixel_values has shape (14, 48)": lambda m: m.mm_inputs.pixel_values.shape.__setitem__(slice(None), [14, 48]),
    "pixel_values has shape (672,)": lambda m: m.mm_inputs.pixel_values.shape.__setitem__(slice(None), [672]),
    "pixel_values has no inline payload": lambda m: setattr(m.mm_inputs.pixel_values.shm, "name", "x"),
    "pixel_values has 671 bytes where its shape needs 672": lambda m: setattr(
        m.mm_inputs.pixel_values, "inline", m.mm_inputs.pixel_values.inline[1:]
    ),
    "image_grid_thw has dtype 'int32'": lambda m: setattr(small(m, "image_grid_thw"), "dtype", "int32"),
    "image_grid_thw has shape (1, 6)": lambda m: small(m, "image_grid_thw").shape.__setitem__(slice(None), [1, 6]),
    "image_grid_thw has 40 bytes": lambda m: set_int64(small(m, "image_grid_thw"), 1, 4, 4, 1, 2),
    "patches_per_image has shape (2, 1)": lambda m: small(m, "patches_per_image").shape.append(1),
    "the grid 2x4x4 is not": lambda m: set_int64(small(m, "image_grid_thw"), 2, 4, 4, 1, 2, 6),
    "the grid 1x0x4 is not": lambda m: set_int64(small(m, "image_grid_thw"), 1, 0, 4, 1, 2, 6),
    "the grid 1x16x1 cannot be merged": lambda m: set_int64(small(m, "image_grid_thw"), 1, 16, 1, 1, 2, 6),
    "patches_per_image 12 is not the product": lambda m: set_int64(small(m, "patches_per_image"), 12, 16),
    "adds up to 44, but pixel_values has 28 rows": double_both_sizes,
    "im_token_id is 901": lambda m: setattr(m.mm_inputs, "im_token_id", 901),
    "im_token_id is 0": lambda m: m.mm_inputs.ClearField("im_token_id"),
    "the span at 2 starts before 11": swap_spans,
    "the span at 3 starts before 6": overlap_spans,
    "ends at 11, after the prompt of 10 ids": beyond_the_end,
    "the span at 2 is 3 long, its image has 4": lambda m: setattr(span(m, 0), "length", 3),
    "the span at 1 holds an id that is no placeholder": shift_span,
    "a placeholder before the span at 2": stray_placeholder(0),
    "a placeholder before the span at 8": stray_placeholder(6),
    "a placeholder after the last span": stray_placeholder(-1),
}


@pytest.mark.parametrize(("facts", "dtype"), [(FACTS, "uint8"), (BFLOAT16, "bfloat16")])
def test_a_good_request_passes(facts, dtype):
    check(message(dtype), facts)
    check(message(None), facts)
    check(message(None, max_tokens=None), facts)


@pytest.mark.parametrize("reason", MUTATIONS)
def test_a_mutated_request_is_refused(reason):
    mutated = message()
    MUTATIONS[reason](mutated)
    with pytest.raises(Refused) as refusal:
        check(mutated, FACTS)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
def test_pixels_come_in_the_announced_dtype_only(dtype):
    with pytest.raises(Refused, match="not 'bfloat16'"):
        check(message(dtype), BFLOAT16)
    check(message(dtype), replace(BFLOAT16, device_normalize=dtype == "uint8", encoder_dtype=dtype))


def test_an_image_above_the_encoders_budget_is_refused():
    with pytest.raises(Refused, match="32 embeddings is above the encoder's budget of 30"):
        check(message(grids=((8, 16),)), FACTS)


def test_a_text_request_with_empty_mm_inputs_is_refused():
    text = message(None)
    text.mm_inputs.SetInParent()
    with pytest.raises(Refused, match="has no placeholder"):
        check(text, FACTS)


def test_the_same_picture_again_keeps_its_hash():
    identities = Identities()
    for _ in range(2):
        identities.remember(message(), FACTS.layout)
    identities.remember(message(None), FACTS.layout)
    identities.remember(message(grids=((2, 2),)), FACTS.layout)


def test_other_pixels_under_a_known_hash_are_refused():
    identities, other = Identities(), message()
    identities.remember(message(), FACTS.layout)
    payload = bytearray(other.mm_inputs.pixel_values.inline)
    payload[-1] ^= 1
    other.mm_inputs.pixel_values.inline = bytes(payload)
    with pytest.raises(Refused, match=other.mm_inputs.mm_hashes[1]):
        identities.remember(other, FACTS.layout)


def test_another_grid_under_a_known_hash_is_refused():
    identities, other = Identities(), message()
    identities.remember(message(), FACTS.layout)
    set_int64(small(other, "image_grid_thw"), 1, 4, 4, 1, 6, 2)
    with pytest.raises(Refused, match=other.mm_inputs.mm_hashes[1]):
        identities.remember(other, FACTS.layout)


def test_two_pictures_of_one_request_need_two_hashes():
    twins = message()
    twins.mm_inputs.mm_hashes[1] = twins.mm_inputs.mm_hashes[0]
    with pytest.raises(Refused, match="belonged to another picture"):
        Identities().remember(twins, FACTS.layout)


def checkpoint(directory, config, processor):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


PROCESSOR = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}


def test_facts_are_read_from_a_checkpoint(tmp_path):
    config = {"model_type": "qwen3_vl", "image_token_id": 7, "text_config": {"vocab_size": 50, "eos_token_id": 9}}
    facts = StrictFacts.from_checkpoint(checkpoint(tmp_path, config, PROCESSOR), device_normalize=True)
    assert facts == StrictFacts(
        "qwen3_vl", 50, 7, patches(16), eos_token_ids=(9,), device_normalize=True, encoder_dtype="bfloat16"
    )
    assert facts.layout.pixels == (1536,)
    assert facts.pixel_dtype == "uint8"


def test_settings_win_over_a_checkpoint_and_several_ends_are_kept(tmp_path):
    config = {"model_type": "qwen2_vl", "vocab_size": 50, "image_token_id": 7, "eos_token_id": [3, 4]}
    facts = StrictFacts.from_checkpoint(checkpoint(tmp_path, config, PROCESSOR), vocab_size=60)
    assert (facts.vocab_size, facts.eos_token_ids) == (60, (3, 4))


@pytest.mark.parametrize(
    ("config", "processor", "complaint"),
    [
        ({"model_type": "qwen2_vl"}, PROCESSOR, "does not say its vocab_size, image_token_id"),
        ([], PROCESSOR, r"config\.json is no JSON object"),
        ({"model_type": "qwen2_vl", "vocab_size": 5, "image_token_id": 4}, {}, "does not say its patch_size"),
    ],
)
def test_a_checkpoint_that_leaves_facts_out_is_refused(tmp_path, config, processor, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        StrictFacts.from_checkpoint(checkpoint(tmp_path, config, processor))


def test_a_directory_without_files_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing or no JSON"):
        StrictFacts.from_checkpoint(tmp_path)
