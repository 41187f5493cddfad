"""Checkpoints by their hub id, against a hub on loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

import hub_mirror
import pixelgate
from goldens import golden
from pixelgate.demo import CHECKPOINT
from pixelgate.errors import CheckpointError
from pixelgate.models import hub
from pixelgate.models.checkpoint import FILES

ID = "Qwen/Qwen2.5-VL-7B-Instruct"
DIRECTORY = golden.CHECKPOINTS / "qwen2_5_vl"
PHOTO = str(golden.COMMITTED / "images" / "photo.jpg")


def files(directory=DIRECTORY, **more):
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()} | more


TOOLS = "additional_chat_templates/tool_use.jinja"


def everything():
    """A model repository with all that is read, and with what must not be asked for."""
    others = {"model.safetensors": b"\0" * 4096, "README.md": b"#", "onnx/config.json": b"{}", "merges.txt": b""}
    optional = {"chat_template.json": b"{}", "processor_config.json": b"{ }", "tekken.json": b"{  }", TOOLS: b"x"}
    return files(CHECKPOINT, **optional) | others


def test_the_arrays_are_those_of_the_directory(mirror):
    mirror.add(ID, files())
    expected, got = pixelgate.load(DIRECTORY)(PHOTO), pixelgate.load(ID)(PHOTO)
    assert list(got) == list(expected)
    assert all(got[name].tobytes() == expected[name].tobytes() for name in expected)


def test_only_what_is_read_is_downloaded_and_only_once(mirror):
    mirror.add(ID, everything())
    found = hub.find(ID)
    assert mirror.downloads == sorted((*FILES, TOOLS))
    assert not any("safetensors" in path for _, path in mirror.asked)
    assert sorted(file.name for file in found.iterdir() if file.is_file()) == sorted(FILES)
    assert (found / TOOLS).read_bytes() == b"x"
    assert (found / "tokenizer.json").read_bytes() == everything()["tokenizer.json"]
    mirror.asked.clear()
    assert hub.find(ID) == found
    assert mirror.downloads == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(mirror):
    changed = json.loads(files()["preprocessor_config.json"]) | {"max_pixels": 28 * 28 * 4}
    mirror.add(ID, files())
    commit = mirror.add(ID, files(**{"preprocessor_config.json": json.dumps(changed).encode()}), "refs/pr/7")
    size = {"height": 1080, "width": 1920}
    assert pixelgate.load(ID).plan(**size).tokens == 2691
    assert pixelgate.load(ID, revision="refs/pr/7").plan(**size).tokens < 5
    assert pixelgate.load(ID, revision=commit).plan(**size).tokens < 5
    assert pixelgate.load(ID, revision="main").plan(**size).tokens == 2691
    mirror.asked.clear()
    assert pixelgate.load(ID, revision=commit).plan(**size).tokens < 5
    assert mirror.asked == []  # a commit cannot have changed


def test_offline_the_cache_is_enough(mirror, monkeypatch):
    mirror.add(ID, everything())
    found = hub.find(ID)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    mirror.asked.clear()
    assert hub.find(ID) == found
    assert hub.find(ID, "main") == found
    assert mirror.asked == []
    with pytest.raises(CheckpointError) as caught:
        hub.find(ID, "v2")
    assert caught.value.message == f"HF_HUB_OFFLINE is set, and the cache lacks files of {ID} at revision 'v2'"
    (found / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=f"HF_HUB_OFFLINE is set, and the cache lacks files of {ID}"):
        hub.find(ID)


def test_without_a_network_the_cache_is_enough(mirror, monkeypatch):
    mirror.add(ID, files())
    found = hub.find(ID)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert hub.find(ID) == found
    with pytest.raises(CheckpointError) as caught:
        hub.find("a/b")
    assert caught.value.message == "the Hugging Face hub cannot be reached or fails, and the cache lacks files of a/b"


def test_a_directory_wins_over_an_id(mirror, tmp_path, monkeypatch):
    mirror.add(ID, files())
    shutil.copytree(DIRECTORY, tmp_path / ID)
    monkeypatch.chdir(tmp_path)
    assert pixelgate.load(ID).checkpoint.path == Path(ID)
    assert mirror.asked == []
    with pytest.raises(CheckpointError, match=f"revision 'main' goes with a hub id; {ID} is a directory"):
        pixelgate.load(ID, revision="main")


@pytest.mark.parametrize("path", ["nowhere", "./a/b", "../a", "/a/b", "a/b/c", "a/", "a/.b", "a/b..c", "a/b--c", "ä/b"])
def test_what_is_neither_a_directory_nor_an_id(mirror, path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        pixelgate.load(path)
    with pytest.raises(CheckpointError, match=r"revision 'v1' goes with a hub id; .* is neither that nor a directory"):
        pixelgate.load(path, revision="v1")
    assert mirror.asked == []


def test_a_path_object_is_never_an_id(mirror):
    with pytest.raises(CheckpointError, match="is not a directory"):
        pixelgate.load(Path("a/b"))
    assert mirror.asked == []


def refusal(model="a/b", revision=None):
    """The message when a model is refused, which must be the project's own from end to end."""
    with pytest.raises(CheckpointError) as caught:
        pixelgate.load(model, revision=revision)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "http://" not in caught.value.message
    return caught.value.message


def test_no_such_model(mirror):
    assert refusal().startswith("there is no directory a/b here, and no such model on the hub")


def test_no_such_revision(mirror):
    mirror.add("a/b", files())
    assert refusal(revision="v9") == "a/b has no branch, tag or commit 'v9' on the hub"
    assert refusal(revision="0" * 40) == f"a/b has no branch, tag or commit '{'0' * 40}' on the hub"


def test_a_gated_model(mirror):
    mirror.add("a/b", files())
    mirror.gated.add("a/b")
    assert refusal().startswith("access to a/b is restricted on the hub: ask for it there")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "the hub answered with HTTP status 401 when asked for a/b; it does not accept the token"),
        (503, "the Hugging Face hub cannot be reached or fails, and the cache lacks files of a/b"),
    ],
)
def test_a_hub_that_refuses_everything(mirror, status, message):
    mirror.fails = status
    assert refusal().startswith(message)


def test_a_hub_that_talks_nonsense(mirror):
    mirror.add("a/b", files())
    mirror.babbles = True
    assert refusal() == "the files of a/b could not be downloaded"


def test_a_cache_that_cannot_be_written(mirror):
    mirror.add("a/b", files())
    Path(constants.HF_HUB_CACHE).write_text("not a directory")
    assert refusal().startswith("the files of a/b could not be downloaded: ")


def test_a_model_without_a_configuration(mirror):
    mirror.add("a/b", {"params.json": b"{}"})
    assert refusal() == "a/b has no config.json on the hub, so it is no checkpoint of a model"


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal().endswith("pip install 'pixelgate[hub]'")
    assert pixelgate.load(DIRECTORY).checkpoint.path == DIRECTORY


def test_the_import_and_a_directory_load_three_packages_only():
    code = (
        "import sys; before = set(sys.modules); import pixelgate; pixelgate.load(sys.argv[1]);"
        "print(*{m.__name__.partition('.')[0] for m in map(sys.modules.get, set(sys.modules) - before)"
        " if 'site-packages' in (getattr(m, '__file__', None) or '')})"
    )
    done = subprocess.run([sys.executable, "-c", code, DIRECTORY], capture_output=True, text=True, check=True)
    extra = {"simplejpeg", "pyspng"}  # pixelgate[fast], where it is installed
    assert set(done.stdout.split()) - extra == {"numpy", "PIL", "ml_dtypes"}


@pytest.mark.parametrize("command", [["tokens", ID, PHOTO], ["process", ID, PHOTO, "-o", "out.npz"]])
def test_the_library_and_the_command_follow_the_variables_of_huggingface_hub(command, tmp_path):
    with hub_mirror.running() as mirror:
        mirror.add(ID, files(), "v1")
        names = {"HF_ENDPOINT": mirror.url, "HF_HOME": str(tmp_path / "home")}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | names
        run = [sys.executable, "-m", "pixelgate.cli", *command, "--revision", "v1"]
        done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert "165" in done.stdout
        assert mirror.downloads == ["chat_template.jinja", "config.json", "preprocessor_config.json"]
        mirror.asked.clear()
        run[-1] = "v2"
        done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines()[-1] == f"pixelgate: {ID} has no branch, tag or commit 'v2' on the hub"
    assert (tmp_path / "home" / "hub" / "models--Qwen--Qwen2.5-VL-7B-Instruct").is_dir()
