"""The committed goldens, which the real transformers made, and the runner itself."""

import json
import shutil
import sys

import pytest

from goldens import check, golden

REMOTE = ("phi3_vision", "phi3_5_vision", "phi4_remote")
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BOTH = ("llava15_clip", "llava15_pad", "llava_next", "llava_onevision", "mistral3", "pixtral")
COVERED = {
    *(f"{family}/remote" for family in REMOTE),
    *(f"{family}/{backend}" for family in (*BOTH, *QWEN) for backend in ("torchvision", "pil")),
    "llama4/torchvision",  # transformers has no other of these two
    "phi4_native/torchvision",
}


def test_every_committed_golden_is_equal():
    counts, failures = check.check(golden.COMMITTED)
    assert failures == []
    assert counts["not covered"] == 0
    assert {name for name in counts if "/" in name} == COVERED
    assert {name.split("/")[0] for name in COVERED} == set(check.FAMILIES)
    assert all(counts[name] >= 17 for name in COVERED)
    assert counts["tokens"] >= 200
    assert counts["sweep"] == 1


@pytest.fixture
def folder(tmp_path):
    """A copy with few rows, to be damaged."""
    index = json.loads((golden.COMMITTED / "index.json").read_text())
    rows = {key: index[key] for key in ("qwen2_vl/pil/photo.jpg", "qwen2_vl/pil/ratio201.png", "qwen2_vl/pil/dot.png")}
    shutil.copytree(golden.COMMITTED / "images", tmp_path / "images")
    shutil.copytree(golden.COMMITTED / "qwen2_vl", tmp_path / "qwen2_vl")
    tokens = {"qwen2_vl/dot.png": {"counts": {"<|image_pad|>": 4}}}

    def write(**changes):
        for key, change in changes.items():
            rows[f"qwen2_vl/pil/{key}"] = change(rows[f"qwen2_vl/pil/{key}"])
        (tmp_path / "index.json").write_text(json.dumps(rows))
        (tmp_path / "tokens.json").write_text(json.dumps(tokens))
        return tmp_path

    return write


def test_the_runner_passes_what_is_equal(folder):
    assert check.check(folder())[1] == []


def test_the_runner_finds_a_changed_value(folder):
    def change(row):
        row["outputs"]["pixel_values"]["sha256"] = "0" * 64
        return row

    failures = check.check(folder(**{"photo.jpg": change}))[1]
    assert len(failures) == 2
    assert "no sampled value differs" in failures[0]


def test_the_runner_finds_a_missing_image(folder):
    path = folder()
    (path / "images" / "photo.jpg").unlink()
    assert ["FileNotFoundError" in failure for failure in check.check(path)[1]] == [True]


def test_the_runner_finds_an_error_that_is_not_raised(folder):
    failures = check.check(folder(**{"dot.png": lambda row: {"status": "error", "error": "ValueError"}}))[1]
    assert failures == ["qwen2_vl/pil/dot.png: transformers raises ValueError, pixelgate does not"]


def test_the_runner_finds_a_refused_picture(folder):
    failures = check.check(folder(**{"ratio201.png": lambda row: {"status": "ok", "outputs": {}}}))[1]
    assert len(failures) == 1
    assert "ImageRefusedError" in failures[0]


def test_the_command_reports_and_fails(folder, monkeypatch, capsys):
    path = folder()
    monkeypatch.setattr(sys, "argv", ["check.py", str(path), "qwen2_vl"])
    assert check.main() == 0
    assert "4 checked, 0 differences" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check.py", str(path), "qwen3_vl"])
    assert check.main() == 1  # nothing to check is a failure, not a success
