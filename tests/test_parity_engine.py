"""The comparison with a vLLM's /render: a stand-in over HTTP that answers as vLLM 0.32 does."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import numpy as np
import pytest

import pixelgate
from goldens import golden
from pixelgate import cli

IMAGES = golden.COMMITTED / "images"
PHOTO, TALL = str(IMAGES / "photo.jpg"), str(IMAGES / "tall.png")
BEFORE = [7, 8]


class Engine:
    """Renders with ``processor`` in the dtype that it wants; ``change`` may spoil an answer, ``status`` refuse it."""

    def __init__(self, processor, dtype):
        self.processor, self.dtype = processor, dtype
        self.status = 200
        self.change = lambda answer, item: None
        self.models = {"data": [{"id": "tiny"}]}
        self.asked = []
        self.keys = []

    def render(self, body):
        self.asked.append(body)
        part = body["messages"][0]["content"][0]
        data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        inputs = self.processor(data, dtype=self.dtype, **body.get("mm_processor_kwargs", {}))
        family, plan = self.processor.family, inputs.plans[0]
        item = {}
        for name, array in inputs.items():
            item[name] = array if array.ndim == 2 and name == family.pixels_name else array[0]
        ids = [id_ for token, n in family.expansion(plan) for id_ in [self.id(token)] * n]
        answer = {
            "token_ids": [*BEFORE, *ids, 9],
            "features": {"mm_placeholders": {"image": [{"offset": len(BEFORE), "length": len(ids)}]}},
        }
        self.change(answer, item)
        packed = {
            name: {"data": [a.dtype.name, list(a.shape), msgspec.msgpack.Ext(3, a.tobytes())], "field": []}
            for name, a in item.items()
        }
        answer["features"]["kwargs_data"] = {"image": [base64.b64encode(msgspec.msgpack.encode(packed)).decode()]}
        return answer

    def id(self, token):
        return self.processor.family.placeholder_id if token == self.processor.family.embedded else 1


@pytest.fixture
def serve():
    servers = []

    def start(name, dtype=None):
        engine = Engine(pixelgate.load(golden.CHECKPOINTS / name), dtype)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                assert self.path == "/v1/models"
                self.answer(200, engine.models)

            def do_POST(self):
                assert self.path == "/v1/chat/completions/render?tensors=1"
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.answer(engine.status, engine.render(body) if engine.status == 200 else {"error": "no such thing"})

            def answer(self, status, value):
                engine.keys.append(self.headers["authorization"])
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        engine.url = f"http://127.0.0.1:{server.server_port}"
        return engine

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(capsys, engine, name, *arguments):
    status = cli.main(["parity", str(golden.CHECKPOINTS / name), *arguments, "--engine", engine.url])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "dtype", "lines"),
    [
        ("qwen2_5_vl", "uint8", ["tokens  165 in", "pixel_values  uint8[660, 1176]", "image_grid_thw  int64[3]"]),
        ("llava_next", None, ["tokens  1416 in", "pixel_values  float32[3, 3, 336, 336]", "image_sizes  int64[2]"]),
        ("mistral3", "bfloat16", ["tokens  176 in the prompt, 165 of", "pixel_values  bfloat16[3, 308, 420]"]),
    ],
)
def test_what_an_engine_feeds_its_model_is_equal(serve, capsys, name, dtype, lines):
    engine = serve(name, dtype)
    if name == "mistral3":  # a vLLM has no image_sizes there
        engine.change = lambda answer, item: item.pop("image_sizes")
    status, printed = run(capsys, engine, name, PHOTO)
    assert status == 0, printed
    assert len(printed.out.splitlines()) == len(lines)
    for line, expected in zip(printed.out.splitlines(), lines, strict=True):
        assert line.startswith(f"equal      {expected}")
    assert engine.asked[0]["model"] == "tiny"
    assert "mm_processor_kwargs" not in engine.asked[0]


def test_pictures_are_numbered_and_options_go_along(serve, capsys):
    engine = serve("qwen2_5_vl", "uint8")
    flags = ["--mm-processor-kwargs", '{"max_pixels": 50000}']
    status, printed = run(capsys, engine, "qwen2_5_vl", PHOTO, TALL, *flags)
    assert status == 0, printed
    assert [line.split()[1] for line in printed.out.splitlines()] == ["[0]"] * 3 + ["[1]"] * 3
    assert [body["mm_processor_kwargs"] for body in engine.asked] == [{"max_pixels": 50_000}] * 2


def test_a_key_is_sent_to_the_engine(serve, capsys):
    engine = serve("qwen2_5_vl", "uint8")
    assert run(capsys, engine, "qwen2_5_vl", PHOTO, "--engine-api-key", "s3cret")[0] == 0
    assert engine.keys == ["Bearer s3cret"] * 2
    assert run(capsys, engine, "qwen2_5_vl", PHOTO)[0] == 0
    assert engine.keys[2:] == [None] * 2


def test_differences_are_said(serve, capsys):
    engine = serve("qwen2_5_vl", "uint8")

    def change(answer, item):
        item["pixel_values"] = item["pixel_values"].copy()
        item["pixel_values"][2, 3] ^= 1
        item["more"] = np.zeros(2, np.int64)
        answer["features"]["mm_placeholders"]["image"][0]["length"] -= 1

    engine.change = change
    status, printed = run(capsys, engine, "qwen2_5_vl", PHOTO)
    assert status == 1
    tokens, pixels, grid, more = printed.out.splitlines()
    assert tokens.startswith("NOT EQUAL  tokens  165 in the prompt, 165 of them embedded, but 164 in the prompt, 164")
    assert pixels.startswith("NOT EQUAL  pixel_values  differs in 1 of")
    assert grid.startswith("equal")
    assert more == "NOT EQUAL  more  is made by the engine alone"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda engine: setattr(engine, "status", 403), "must run with --enable-scale-out"),
        (lambda engine: setattr(engine, "status", 400), "HTTP status 400"),
        (lambda engine: setattr(engine, "models", {"data": []}), "names no model"),
        (lambda engine: setattr(engine, "url", "http://127.0.0.1:1"), "did not answer"),
        (lambda engine: setattr(engine, "url", "foo"), "give http://HOST:PORT"),
        (lambda engine: setattr(engine, "change", lambda answer, item: answer.pop("token_ids")), "something else"),
        (
            lambda engine: setattr(engine, "change", lambda answer, item: item.update(pixel_values=np.zeros(2, "U1"))),
            "something else",
        ),
    ],
)
def test_engines_that_cannot_render_are_said(serve, capsys, spoil, message):
    engine = serve("qwen2_5_vl")
    spoil(engine)
    status, printed = run(capsys, engine, "qwen2_5_vl", PHOTO)
    assert status == 1
    assert message in printed.err
