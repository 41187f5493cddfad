"""The command line."""

import ast
import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pixelgate
from goldens import golden
from pixelgate import cli
from pixelgate.demo import CHECKPOINT as DEMO_CHECKPOINT
from pixelgate.gateway import supervisor

CHECKPOINT = str(golden.CHECKPOINTS / "qwen2_5_vl")
WITHOUT_TEMPLATE = str(golden.CHECKPOINTS / "llava15_pad")
PHOTO = str(golden.COMMITTED / "images" / "photo.jpg")
TALL = str(golden.COMMITTED / "images" / "tall.png")


def test_process_writes_the_arrays(tmp_path, capsys):
    output = tmp_path / "out.npz"
    assert cli.main(["process", CHECKPOINT, PHOTO, TALL, "-o", str(output)]) == 0
    expected = pixelgate.load(CHECKPOINT)([PHOTO, TALL])
    with np.load(output) as arrays:
        assert set(arrays) == set(expected)
        assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)
    printed = capsys.readouterr().out
    assert f"pixel_values  float32{list(expected['pixel_values'].shape)}" in printed
    assert f"tokens  {expected.token_counts[0]} {expected.token_counts[1]}" in printed


def test_process_keeps_the_bits_of_bfloat16(tmp_path):
    output = tmp_path / "out.npz"
    flags = ["--dtype", "bfloat16", "--backend", "pil", "--rgb", "hf"]
    assert cli.main(["process", CHECKPOINT, PHOTO, "-o", str(output), *flags]) == 0
    expected = pixelgate.load(CHECKPOINT, backend="pil", rgb="hf")(PHOTO, dtype="bfloat16")["pixel_values"]
    with np.load(output) as arrays:
        assert arrays["pixel_values"].dtype == np.uint16
        assert arrays["pixel_values"].tobytes() == expected.tobytes()


def test_tokens_of_pictures_and_of_sizes(capsys):
    assert cli.main(["tokens", CHECKPOINT, PHOTO]) == 0
    assert capsys.readouterr().out == f"165\t{PHOTO}\n"
    assert cli.main(["tokens", CHECKPOINT, "--size", "1920x1080", "--size", "640x480"]) == 0
    assert capsys.readouterr().out == "2691\t1920x1080\n391\t640x480\n"


@pytest.fixture
def conversation(tmp_path):
    """Writes messages with a picture of each reference to a file, beside a picture called photo.jpg."""

    def write(*references, **fields):
        (tmp_path / "photo.jpg").write_bytes(Path(PHOTO).read_bytes())
        parts = [{"type": "image_url", "image_url": {"url": reference}} for reference in references]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "And <|image_pad|>?"}]}]
        file = tmp_path / "messages.json"
        file.write_text(json.dumps({"messages": messages, **fields} if fields else messages))
        return str(file)

    return write


def test_tokens_of_a_conversation(conversation, capsys):
    url = "data:image/png;base64," + base64.b64encode(Path(TALL).read_bytes()).decode()
    file = conversation("photo.jpg", url, PHOTO)
    assert cli.main(["tokens", str(DEMO_CHECKPOINT), "--messages", file, "--ids"]) == 0
    prompt, *images, ids = capsys.readouterr().out.splitlines()
    ids = [int(id_) for id_ in ids.split()]
    tall = pixelgate.load(DEMO_CHECKPOINT)(TALL).token_counts[0]
    assert prompt == f"{len(ids)}\tprompt"
    assert images == ["165\tphoto.jpg", f"{tall}\tmessages[0].content[1].image_url", f"165\t{PHOTO}"]
    assert ids.count(151655) == 330 + tall


def test_a_conversation_may_be_a_chat_request(conversation, capsys):
    counts = []
    for fields in ({"model": "x"}, {"add_generation_prompt": False}, {"mm_processor_kwargs": {"max_pixels": 50000}}):
        assert cli.main(["tokens", str(DEMO_CHECKPOINT), "--messages", conversation("photo.jpg", **fields)]) == 0
        counts.append([int(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines()])
    (whole, image), (shorter, _), (smaller, small) = counts
    assert whole - shorter == 3
    assert small < image == 165
    assert whole - smaller == image - small


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing.jpg", "messages[0].content[0].image_url: there is no picture file"),
        ("https://example.org/a.png", "content[0].image_url: nothing is fetched here: give a file or a data: URL"),
        ("data:image/png;base64,!!!", "content[0].image_url: the data: URL is not valid base64"),
        ("file:///etc/passwd", "content[0].image_url: a picture must be given as"),
        ("messages.json", "content[0].image_url: not a picture"),
    ],
)
def test_what_is_wrong_in_a_conversation_is_said(conversation, reference, message, capsys):
    file = conversation(reference)
    assert cli.main(["tokens", str(DEMO_CHECKPOINT), "--messages", file]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"pixelgate: {file}: messages[0].")
    assert message in error


def test_messages_need_the_gateway(conversation, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.delitem(sys.modules, "pixelgate.conversation", raising=False)
    assert cli.main(["tokens", str(DEMO_CHECKPOINT), "--messages", conversation()]) == 1
    assert "this needs msgspec: pip install 'pixelgate[gateway]'" in capsys.readouterr().err


def test_options_of_the_processor(capsys, tmp_path):
    options = ["--mm-processor-kwargs", '{"max_pixels": 50000}']
    assert cli.main(["tokens", CHECKPOINT, "--size", "640x480", *options]) == 0
    assert capsys.readouterr().out == "54\t640x480\n"
    output = tmp_path / "out.npz"
    assert cli.main(["process", CHECKPOINT, PHOTO, "-o", str(output), *options]) == 0
    expected = pixelgate.load(CHECKPOINT)(PHOTO, max_pixels=50_000)["pixel_values"]
    with np.load(output) as arrays:
        assert arrays["pixel_values"].tobytes() == expected.tobytes()


def test_options_that_are_no_object_are_refused(capsys):
    for text in ("5", "max_pixels=5"):
        with pytest.raises(SystemExit):
            cli.main(["tokens", CHECKPOINT, "--size", "9x9", "--mm-processor-kwargs", text])
        assert "a JSON object is needed" in capsys.readouterr().err


def test_pictures_may_follow_options(capsys):
    assert cli.main(["tokens", CHECKPOINT, "--backend", "pil", PHOTO, TALL]) == 0
    assert [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()] == [PHOTO, TALL]
    for wrong in (["tokens", CHECKPOINT, "--sizes", "9x9"], ["demo", PHOTO, TALL]):
        with pytest.raises(SystemExit):
            cli.main(wrong)
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokens", CHECKPOINT], "--size WIDTHxHEIGHT"),
        (["tokens", CHECKPOINT, "--size", "1920"], "1920x1080"),
        (["tokens", CHECKPOINT, "--size", "201x1"], "at most 200"),
        (["tokens", CHECKPOINT, str(golden.COMMITTED / "index.json")], "index.json: not a picture"),
        (["tokens", CHECKPOINT, str(golden.COMMITTED / "images" / "ratio201.png")], "ratio201.png: a picture of 201x1"),
        (["serve", "--name", "x", "--config", "x.toml"], "not both"),
        (["tokens", CHECKPOINT, "nothing.jpg"], "no picture file 'nothing.jpg'"),
        (["tokens", "nowhere", PHOTO], "nowhere is not a directory"),
        (["process", CHECKPOINT, PHOTO, "-o", "/nowhere/out.npz"], "cannot be written"),
        (["process", CHECKPOINT, str(golden.COMMITTED / "index.json"), "-o", "x.npz"], "not a picture"),
        (["tokens", CHECKPOINT, "--size", "9x9", "--revision", "v1"], "revision 'v1' goes with a hub id"),
        (["serve", str(DEMO_CHECKPOINT), "--engine", "local:reader", "--revision", "v1"], "goes with a hub id"),
        (["serve", "--revision", "v1", "--config", "x.toml"], "not both"),
        (["serve"], "give --engine URL"),
        (["serve", "", "--engine", "local:reader"], "the checkpoint is an empty text"),
        (["serve", "--engine", "local:reader"], "local:reader has no files of its own"),
        (["serve", "--engine", "vllm+grpc://a:1", "--revision", "v1"], "a revision goes with a hub id"),
        (["serve", CHECKPOINT], "at least one engine"),
        (["serve", CHECKPOINT, "--engine", "vllm+grpc://x:1"], "no tokenizer.json"),
        (["serve", WITHOUT_TEMPLATE, "--engine", "vllm+grpc://x:1"], "no chat template"),
        (["serve", str(DEMO_CHECKPOINT), "--engine", "http://x"], "not an engine address"),
        (["serve", CHECKPOINT, "--config", "x.toml"], "not both"),
        (["serve", "--engine-api-key", "k", "--config", "x.toml"], "not both"),
        (["serve", "--engine", "vllm+http://a:1"], "has no files of its own"),
        (["serve", "--engine", "vllm+grpc://a:1", "--engine-api-key", "k"], "for engines behind HTTP"),
        (["serve", "--config", "nowhere.toml"], r"nowhere.toml cannot be read"),
        (["tokens", CHECKPOINT, PHOTO, "--messages", "m.json"], "--messages FILE"),
        (["tokens", CHECKPOINT, PHOTO, "--ids"], "--ids goes with --messages"),
        (["tokens", str(DEMO_CHECKPOINT), "--messages", "nowhere.json"], "nowhere.json cannot be read"),
        (["tokens", str(DEMO_CHECKPOINT), "--messages", PHOTO], "photo.jpg is not valid JSON"),
        (["demo", "nothing.jpg"], "no picture file"),
        (["demo", str(golden.COMMITTED / "index.json")], "not a picture"),
    ],
)
def test_refusals_are_one_line_in_words(arguments, message, capsys):
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pixelgate: ")
    assert message in error


def test_serve_takes_flags_and_files(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(supervisor, "run", lambda read: seen.append(read()))
    url = "vllm+grpc://127.0.0.1:1"
    assert cli.main(["serve", CHECKPOINT, "--engine", url, "--engine", url, "--port", "9", "--host", "::1"]) == 0
    assert (seen[0].host, seen[0].port) == ("::1", 9)
    assert seen[0].models[0].name == "qwen2_5_vl"
    assert seen[0].models[0].engines == (url, url)
    file = tmp_path / "pixelgate.toml"
    file.write_text(f'port = 7\n[[model]]\nname = "m"\ncheckpoint = "{CHECKPOINT}"\nengines = ["{url}"]\n')
    assert cli.main(["serve", "--config", str(file)]) == 0
    assert (seen[1].port, seen[1].models[0].name) == (7, "m")
    assert cli.main(["serve", "--config", str(file), "--port", "8"]) == 0
    assert seen[2].port == 8
    flags = ["--engine", url, "--mm-processor-kwargs", '{"max_pixels": 5000}']
    assert cli.main(["serve", CHECKPOINT, *flags]) == 0
    assert seen[3].models[0].mm_processor_kwargs == {"max_pixels": 5000}
    assert cli.main(["serve", "a/b", "--revision", "v1", "--engine", url]) == 0
    assert (seen[4].models[0].checkpoint, seen[4].models[0].revision, seen[4].models[0].name) == ("a/b", "v1", "a/b")
    assert cli.main(["serve", "--engine", url]) == 0
    assert (seen[5].models[0].checkpoint, seen[5].models[0].name) == ("", "")
    assert cli.main(["serve", CHECKPOINT, "--engine", url, "--backend", "pil", "--shutdown-timeout", "3"]) == 0
    assert (seen[-1].models[0].backend, seen[-1].shutdown_timeout) == ("pil", 3.0)


def test_missing_extras_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "pixelgate.demo.run", raising=False)
    assert cli.main(["demo"]) == 1
    assert "pip install 'pixelgate[gateway,reader]'" in capsys.readouterr().err


def test_demo_reads_the_receipt_out_of_the_tensor(capsys):
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    for line in ("Paper Boat Bakery", "2 Croissants 5.60", "Total EUR 17.70"):
        assert line in printed
    assert "pixel_values float32[7600, 1176]" in printed
    assert "1900 of them for the picture" in printed
    assert "first token" in printed


def test_the_command_without_the_gateway_imports_none_of_it():
    code = (
        "import sys; from pixelgate import cli; "
        "cli.main(['tokens', sys.argv[1], '--size', '9x9']); print(list(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, CHECKPOINT], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in ast.literal_eval(done.stdout.splitlines()[1])}
    assert not loaded & {"starlette", "uvicorn", "grpc", "aiohttp", "jinja2", "tokenizers", "msgspec"}


def test_help_and_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"pixelgate {pixelgate.__version__}"
