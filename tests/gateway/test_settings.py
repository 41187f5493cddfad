from __future__ import annotations

import dataclasses
import os
import re

import pytest

from pixelgate.errors import ConfigError
from pixelgate.gateway.configure import configure
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.media.policy import MediaPolicy

ONE = '[[model]]\ncheckpoint = "/models/qwen"\nengines = ["vllm+grpc://a:1"]\n'


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "gateway.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_everything_can_be_said(written):
    settings = configure(
        file=written("""
            host = "0.0.0.0"
            port = 9000
            max_body_bytes = 1000
            max_tensor_bytes = 2000
            threads = 3
            tensor_cache_bytes = 0
            engine_wait = 5

            [media]
            schemes = ["https", "data"]
            max_images = 2
            fetch_timeout = 1.5
            allow_private = ["10.0.0.0/8", "images"]
            rgb = "hf"

            [[model]]
            checkpoint = "/models/qwen"
            engines = ["vllm+grpc://a:1", "vllm+grpc://b:1"]
            name = "first"
            backend = "pil"

            [[model]]
            checkpoint = "/models/qwen"
            engines = ["local:reader"]

            [[model]]
            checkpoint = "Qwen/Qwen2.5-VL-7B-Instruct"
            revision = "main"
            engines = ["vllm+grpc://c:1"]
        """)
    )
    assert settings == GatewaySettings(
        models=(
            ModelSettings("/models/qwen", ("vllm+grpc://a:1", "vllm+grpc://b:1"), "first", "pil"),
            ModelSettings("/models/qwen", ("local:reader",), "qwen"),
            ModelSettings(
                "Qwen/Qwen2.5-VL-7B-Instruct",
                ("vllm+grpc://c:1",),
                "Qwen/Qwen2.5-VL-7B-Instruct",
                revision="main",
            ),
        ),
        host="0.0.0.0",
        port=9000,
        media=MediaPolicy(
            schemes=("https", "data"), max_images=2, fetch_timeout=1.5, allow_private=("10.0.0.0/8", "images"), rgb="hf"
        ),
        max_body_bytes=1000,
        max_tensor_bytes=2000,
        threads=3,
        tensor_cache_bytes=0,
        engine_wait=5,
    )


def test_defaults(written):
    settings = configure(file=written(ONE))
    assert settings == GatewaySettings(models=(ModelSettings("/models/qwen", ("vllm+grpc://a:1",)),))
    assert settings.models[0].name == "qwen"
    assert settings.host == "127.0.0.1"  # nobody is served from outside without having been asked
    assert settings.threads == len(os.sched_getaffinity(0))
    assert settings.media == MediaPolicy()


def test_a_model_is_called_by_its_id_or_by_its_directory(tmp_path, monkeypatch):
    assert ModelSettings("a/b", ("local:reader",)).name == "a/b"
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert ModelSettings("a/b", ("local:reader",)).name == "b"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no model is configured"),
        ("port = ", "is not valid TOML"),
        (b"\xff", "is not valid TOML"),
        ('[model]\ncheckpoint = "a"', r"models are written as \[\[model\]\] tables"),
        (ONE + "mm_processor_kwargs = 3", r"mm_processor_kwargs in \[\[model\]\] must be a table"),
        (ONE.replace("[[", "trust_request_mm_kwargs = 1\n[["), "trust_request_mm_kwargs .* must be true or false"),
        ("model = 3", r"models are written as \[\[model\]\] tables"),
        ("models = []\n" + ONE, r"models are written as \[\[model\]\] tables"),
        ("model = [3]", r"\[\[model\]\] must be a table"),
        ("media = 3\n" + ONE, r"\[media\] must be a table"),
        ("prt = 1\n" + ONE, "the configuration has no setting 'prt'; it knows .*port"),
        (ONE + "engine = 1", r"\[\[model\]\] has no setting 'engine'; it knows checkpoint, engines, name, backend"),
        (ONE + "[media]\nmax_image = 1", r"\[media\] has no setting 'max_image'; it knows .*max_images"),
        ('[[model]]\ncheckpoint = "a"', "a model needs at least one engine"),
        ("[[model]]", "a model needs at least one engine"),
        ('[[model]]\nengines = ["a"]\nrevision = "b"', "a revision goes with a hub id; there is no checkpoint"),
        ('[[model]]\ncheckpoint = "a"\nengines = []', "a model needs at least one engine"),
        ('[[model]]\ncheckpoint = "a"\nengines = "b"', r"engines in \[\[model\]\] must be a list of strings, not 'b'"),
        (
            '[[model]]\ncheckpoint = "a"\nengines = [1]',
            r"engines in \[\[model\]\] must be a list of strings, not \[1\]",
        ),
        ('[[model]]\ncheckpoint = 1\nengines = ["b"]', r"checkpoint in \[\[model\]\] must be a string, not 1"),
        (ONE + 'backend = "torch"', "backend must be one of torchvision, pil, remote, not 'torch'"),
        (ONE + "backend = []", r"backend must be one of torchvision, pil, remote, not \(\)"),
        (ONE + 'bos = "hf"', "bos must be one of engine, transformers, not 'hf'"),
        (ONE.replace("[[", 'shm = "on"\n[['), "shm must be one of auto, off, not 'on'"),
        (
            ONE.replace("[[", 'log_level = "loud"\n[['),
            "log_level must be one of debug, info, warning, error, not 'loud'",
        ),
        (ONE.replace("[[", 'log_format = "xml"\n[['), "log_format must be one of text, json, not 'xml'"),
        (ONE.replace("[[", 'trace_endpoint = "collector:4317"\n[['), "trace_endpoint must look like http://HOST:PORT"),
        (ONE.replace("[[", 'trace_endpoint = "http://a:b@c:1"\n[['), "trace_endpoint must look like http://HOST:PORT"),
        ("trace_sample = 1.5\n" + ONE, "trace_sample must be between 0 and 1, not 1.5"),
        ("trace_sample = nan\n" + ONE, "trace_sample must be between 0 and 1, not nan"),
        ("drain_delay = -1\n" + ONE, "drain_delay must be a number of seconds, not -1"),
        (ONE + 'balance = "even"', "balance must be one of least-load, round-robin, image-affinity, not 'even'"),
        (ONE + "revision = 1", r"revision in \[\[model\]\] must be a string, not 1"),
        (ONE + ONE, "two models have the same name: qwen, qwen"),
        ('port = "80"\n' + ONE, "port in the configuration must be a whole number, not '80'"),
        ("port = true\n" + ONE, "port in the configuration must be a whole number, not True"),
        ("port = 1.5\n" + ONE, "port in the configuration must be a whole number, not 1.5"),
        ("port = 65536\n" + ONE, "port must be between 0 and 65535, not 65536"),
        ("port = -1\n" + ONE, "port must be between 0 and 65535, not -1"),
        ("host = 1\n" + ONE, "host in the configuration must be a string, not 1"),
        ("engine_wait = false\n" + ONE, "engine_wait in the configuration must be a number, not False"),
        ("engine_wait = -1\n" + ONE, "engine_wait must be a number of seconds, not -1"),
        ("engine_wait = nan\n" + ONE, "engine_wait must be a number of seconds, not nan"),
        ("engine_wait = inf\n" + ONE, "engine_wait must be a number of seconds, not inf"),
        ("threads = 0\n" + ONE, "threads must be at least 1, not 0"),
        ("max_body_bytes = 0\n" + ONE, "max_body_bytes must be at least 1, not 0"),
        ("max_tensor_bytes = -5\n" + ONE, "max_tensor_bytes must be at least 1, not -5"),
        ("tensor_cache_bytes = -1\n" + ONE, "tensor_cache_bytes must not be negative, not -1"),
        (ONE + '[media]\nmax_images = "3"', r"max_images in \[media\] must be a whole number, not '3'"),
        (ONE + "[media]\nmax_images = 0", "max_images must be a whole number of at least 1"),
        (ONE + "[media]\nallow_private = [3]", r"allow_private in \[media\] must be a list of strings, not \[3\]"),
        (ONE + '[media]\nallow_private = ["10.0.0.1/8"]', "allow_private"),
        (ONE + "[media]\nrgb = 3", 'rgb must be "pixelgate" or "hf", not 3'),
    ],
)
def test_mistakes_are_named_with_the_file(written, text, reason):
    path = written(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        configure(file=path)
    assert caught.value.message.startswith(str(path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        configure(file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        configure(file=str(tmp_path))


HTTP = "vllm+http://a:1"
NAME = "dns+vllm+http://engines:1"


def test_headers_are_those_of_the_model_and_the_engine():
    model = ModelSettings(
        "c", (HTTP, "vllm+grpc://a:2"), engine_api_key="secret", engine_headers={HTTP: {"X-Team": "hidden"}}
    )
    assert model.headers(HTTP) == {"authorization": "Bearer secret", "x-team": "hidden"}
    assert model.headers("vllm+grpc://a:2") == {"authorization": "Bearer secret"}
    own = ModelSettings("c", (HTTP,), engine_api_key="secret", engine_headers={HTTP: {"Authorization": "Basic x"}})
    assert own.headers(HTTP) == {"authorization": "Basic x"}
    found = ModelSettings("c", ("file:engines",), engine_api_key="secret")
    assert found.headers("vllm+http://10.0.0.1:1") == {"authorization": "Bearer secret"}
    assert "secret" not in repr(model)
    assert "hidden" not in repr(model)


@pytest.mark.parametrize(
    ("engines", "settings", "message"),
    [
        (("vllm+grpc://a:1",), {"engine_api_key": "secret"}, "for engines behind HTTP"),
        ((HTTP,), {"engine_api_key": "secret\r\nx: y"}, "a header cannot carry"),
        ((HTTP,), {"engine_headers": {"vllm+http://b:1": {}}}, "none of this model's engines behind HTTP"),
        (("vllm+grpc://a:1",), {"engine_headers": {"vllm+grpc://a:1": {}}}, "none of this model's engines"),
        ((HTTP,), {"engine_headers": {HTTP: "secret"}}, "must have a table"),
        ((NAME,), {"engine_headers": {NAME: {"a": "secret"}}}, "is a name of several engines"),
        ((HTTP,), {"engine_headers": {HTTP: {"a b": "secret"}}}, "'a b' of 'vllm+http://a:1' cannot be sent"),
        ((HTTP,), {"engine_headers": {HTTP: {"a": "secret\n"}}}, "'a' of 'vllm+http://a:1' cannot be sent"),
        ((HTTP,), {"engine_headers": {HTTP: {"a": 3}}}, "'a' of 'vllm+http://a:1' cannot be sent"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_without_their_values(engines, settings, message):
    with pytest.raises(ConfigError) as caught:
        ModelSettings("c", engines, **settings)
    assert message in caught.value.message
    assert "secret" not in caught.value.message


def test_what_belongs_to_engines_behind_http_can_be_said(written):
    settings = configure(
        file=written(
            ONE.replace("vllm+grpc", "openai+http")
            + """
            engine_model = "m"
            engine_api_key = "k"
            engine_headers = { "openai+http://a:1" = { x-team = "hidden" } }
            resize = true
        """
        )
    )
    (model,) = settings.models
    assert (model.engine_model, model.resize) == ("m", True)
    assert model.headers("openai+http://a:1") == {"authorization": "Bearer k", "x-team": "hidden"}


def test_every_worker_gets_its_part_of_what_holds_for_all():
    divided = {each.name for each in dataclasses.fields(GatewaySettings) if each.metadata.get("divided")}
    all_together = re.compile(r"max_connections|threads|max_queue|\w+_in_flight|\w*cache\w*_bytes")
    assert divided == {each.name for each in dataclasses.fields(GatewaySettings) if all_together.fullmatch(each.name)}
    model = ModelSettings("/models/qwen", ("vllm+grpc://a:1",))
    settings = GatewaySettings(
        (model,), workers=3, max_connections=8, threads=2, tensor_cache_bytes=0, max_body_bytes=9
    )
    share = settings.share()
    assert (share.max_connections, share.threads, share.tensor_cache_bytes, share.max_body_bytes) == (2, 1, 0, 9)
    assert share.max_pixels_in_flight == settings.max_pixels_in_flight // 3
    assert GatewaySettings((model,)).share() == GatewaySettings((model,))


def test_parts_too_small_for_one_request_are_told():
    model = ModelSettings("/models/qwen", ("vllm+grpc://a:1",))
    assert GatewaySettings((model,)).narrow == []
    assert GatewaySettings((model,), max_bytes_in_flight=1).narrow == []  # chosen so, and no matter of workers
    assert GatewaySettings((model,), workers=20).narrow == [
        "max_bytes_in_flight is 53687091 for each of 20 workers, less than the 67108864 of max_body_bytes",
        "max_pixels_in_flight is 25600000 for each of 20 workers, less than the 64000000 of max_pixels of a picture",
        "max_tensor_bytes_in_flight is 107374182 for each of 20 workers, less than the 1073741824 of max_tensor_bytes",
    ]


def test_the_admin_has_a_port_of_its_own():
    model = ModelSettings("/models/qwen", ("vllm+grpc://a:1",))
    with pytest.raises(ConfigError, match="admin_host must have another port than the gateway's own, 9000"):
        GatewaySettings((model,), port=9000, admin_host="9000")
