"""Checkpoints whose settings a test changes."""

import json
import shutil

import pytest

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
