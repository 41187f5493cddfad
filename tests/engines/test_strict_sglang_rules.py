"""The strict SGLang refuses every request that the real one would die of, or answer nonsense to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sglang_requests import FACTS, IMG, request
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.engines.sglang_wire import encode
from pixelgate.testing.strict_layouts import AnyRes, Refused, patches
from pixelgate.testing.strict_sglang_rules import check

PICTURES = ((2, 3), (1, 2))


def message(grids=PICTURES, **sampling):
    return pb.GenerateRequest.FromString(encode(request(grids, **sampling)))


def test_good_requests_pass():
    for grids in (None, ((1, 1),), PICTURES):
        check(message(grids), FACTS)
    check(message(None, n=2, temperature=1.0, logit_bias=((7, 1.0),), stop=("a",)), FACTS)


def change(path, value):
    def spoil(sent):
        *parents, name = path.split(".")
        for parent in parents:
            sent = getattr(sent, parent)
        if isinstance(value, list):
            del getattr(sent, name)[:]
            getattr(sent, name).extend(value)
        elif value is None:
            sent.ClearField(name)
        else:
            setattr(sent, name, value)

    return spoil


def uint8(sent):
    pixels = sent.mm_inputs.pixel_values
    pixels.dtype, pixels.data = "uint8", bytes(len(pixels.data) // 4)


def int32(sent):
    sent.mm_inputs.model_specific_tensors["image_sizes"].dtype = "int32"


def unfilled(sent):
    pixels = sent.mm_inputs.pixel_values
    pixels.data = np.ones(pixels.shape, np.float32).tobytes()


def other_size(sent):
    sent.mm_inputs.model_specific_tensors["image_sizes"].data = np.array([[8, 12], [8, 8]]).tobytes()


def too_tall(sent):
    sent.mm_inputs.model_specific_tensors["image_sizes"].data = np.array([[80, 12], [4, 8]]).tobytes()


def whole_span(sent):
    """As vLLM wants it: with the tokens between rows."""
    del sent.mm_inputs.mm_placeholders[1:]
    sent.mm_inputs.mm_placeholders[0].length = 8


def two_ranges_in_one(sent):
    first, second = sent.mm_inputs.mm_placeholders[:2]
    sent.tokenized.input_ids[first.offset + first.length] = IMG
    first.length += second.length + 1
    del sent.mm_inputs.mm_placeholders[1]


def unsized(sent):
    del sent.mm_inputs.model_specific_tensors["image_sizes"]


def video(sent):
    sent.mm_inputs.image_data.append(b"jpeg")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (change("request_id", ""), "request_id"),
        (change("data_parallel_rank", 1), "data_parallel_rank"),
        (change("tokenized.input_ids", []), "no input_ids"),
        (change("tokenized.input_ids", [5] * 600), "no room"),
        (change("tokenized.input_ids", [1000]), "vocabulary"),
        (change("logprob_start_len", 0), "logprob_start_len"),
        (change("sampling_params.temperature", -1.0), "temperature"),
        (change("sampling_params.top_p", 1.5), "top_p"),
        (change("sampling_params.top_k", -2), "top_k"),
        (change("sampling_params.min_p", 2.0), "min_p"),
        (change("sampling_params.presence_penalty", 3.0), "presence"),
        (change("sampling_params.frequency_penalty", -3.0), "frequency"),
        (change("sampling_params.repetition_penalty", 2.5), "repetition"),
        (change("sampling_params.n", 0), "n is unset"),
        (change("sampling_params.regex", ""), "regex is empty"),
        (change("sampling_params.stop", [""]), "stop string"),
        (change("sampling_params.max_new_tokens", 0), "max_new_tokens"),
        (change("sampling_params.min_new_tokens", 65), "min_new_tokens"),
        (lambda sent: sent.sampling_params.logit_bias.update({"1000": 1.0}), "logit_bias"),
        (change("mm_inputs", None), "mm_inputs is missing"),
        (change("mm_inputs.modalities", ["video"]), "modalities"),
        (change("mm_inputs.im_token_id", 5), "im_token_id"),
        (video, "image_data"),
        (unsized, "model_specific_tensors"),
        (uint8, "pixel_values has dtype 'uint8'"),
        (int32, "image_sizes has dtype 'int32'"),
        (change("mm_inputs.pixel_values.data", b"1234"), "4 bytes"),
        (change("mm_inputs.pixel_values.shape", [1, 6, 8, 12]), "pixel_values has shape"),
        (unfilled, "filled up"),
        (other_size, "ranges are"),
        (too_tall, "image_sizes has 80x12"),
        (whole_span, "not where the placeholders are"),
        (two_ranges_in_one, "ranges are"),
        (change("mm_inputs.mm_placeholders", []), "not where the placeholders are"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused(spoil, complaint):
    sent = message()
    spoil(sent)
    with pytest.raises(Refused, match=complaint):
        check(sent, FACTS)


def test_several_answers_without_a_stream():
    sent = message(None, n=2, temperature=1.0)
    sent.stream = False
    with pytest.raises(Refused, match="index 0"):
        check(sent, FACTS)


def test_models_whose_positions_get_lost():
    with pytest.raises(Refused, match="qwen2_vl"):
        check(message(), replace(FACTS, model_type="qwen2_vl", layout=patches(2)))


def test_more_pictures_than_the_engine_takes():
    with pytest.raises(Refused, match="2 images"):
        check(message(), replace(FACTS, max_images=1))


def test_tiles_have_one_size():
    tiles = AnyRes((None, 3, 4, 4), tile=4, grid=2, base=4, canvases=((4, 4),))
    with pytest.raises(Refused, match="pixel_values has shape"):
        check(message(), replace(FACTS, model_type="llava_next", layout=tiles))
