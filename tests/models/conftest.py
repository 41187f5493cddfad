"""Checkpoints whose settings a test changes."""

import json
import shutil

import pytest
from huggingface_hub import constants

import hub_mirror
from goldens import golden
from pixelgate.models import checkpoint as checkpoints
from pixelgate.models.family import choose_backend, from_checkpoint


def family_of(path, backend=None):
    """The family of a checkpoint, by its directory or its name among the goldens'."""
    checkpoint = checkpoints.read(golden.CHECKPOINTS / path)
    return from_checkpoint(checkpoint, backend=choose_backend(checkpoint, backend), pillow_order="13")


@pytest.fixture
def altered(tmp_path):
    """A copy of a golden's checkpoint with settings changed; "absent" takes one away."""

    def make(file="preprocessor_config.json", of="qwen2_5_vl", **changes):
        folder = tmp_path / "checkpoint"
        shutil.copytree(golden.CHECKPOINTS / of, folder)
        values = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
        return folder

    return make


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A hub on loopback that huggingface_hub asks instead of the real one, and an empty cache."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_mirror.running() as mirror:
        # what HF_ENDPOINT and the like say, which are read when the library is imported
        monkeypatch.setattr(constants, "ENDPOINT", mirror.url)
        resolve = mirror.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield mirror
