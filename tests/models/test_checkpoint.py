"""Reading a checkpoint directory."""

import json

import pytest

from pixelgate.errors import CheckpointError
from pixelgate.models import checkpoint as checkpoints


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        for name, value in files.items():
            path = tmp_path / (name.replace("__", ".") if "__" in name else f"{name}.json")
            path.write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path

    return write


def test_a_whole_checkpoint(folder):
    path = folder(
        config={"model_type": "x"},
        preprocessor_config={"image_processor_type": "AFast", "processor_class": "B"},
        generation_config={"eos_token_id": [2, 3]},
        chat_template__jinja="{{ messages }}",
        tokenizer={},
    )
    checkpoint = checkpoints.read(path)
    assert checkpoint.model_type == "x"
    assert checkpoint.image_processor == "A"
    assert checkpoint.eos_token_ids == (2, 3)
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.tokenizer_file == path / "tokenizer.json"
    (path / "tekken.json").write_text("{}")
    assert checkpoint.tokenizer_file == path / "tokenizer.json"
    (path / "tokenizer.json").unlink()
    assert checkpoint.tokenizer_file == path / "tekken.json"


def test_a_section_of_processor_config_comes_before_the_older_file(folder):
    nested = {"image_processor": {"patch_size": 3}}
    path = folder(config={}, preprocessor_config={"patch_size": 4}, processor_config=nested)
    assert checkpoints.read(path).preprocessor == {"patch_size": 3}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"processor_config": {"image_processor": [3]}}, "image_processor of .* is no object"),
        ({"preprocessor_config": "[" * 100_000}, "not valid JSON"),
    ],
)
def test_files_of_another_form_are_refused(folder, files, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read(folder(config={}, **files))


def test_a_template_that_is_no_text_is_refused(folder):
    path = folder(config={}, preprocessor_config={"a": 1})
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not text in UTF-8"):
        checkpoints.read(path)


def test_names_that_no_directory_can_have_are_refused():
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(CheckpointError, match="is not a directory"):
            checkpoints.read(name)


def test_newer_checkpoints_keep_the_image_processor_in_processor_config(folder):
    checkpoint = checkpoints.read(folder(config={}, processor_config={"image_processor": {"patch_size": 3}}))
    assert checkpoint.preprocessor == {"patch_size": 3}


def test_the_template_is_found_in_older_places_too(folder):
    path = folder(config={"eos_token_id": 7}, preprocessor_config={"a": 1}, tokenizer_config={"chat_template": "old"})
    assert checkpoints.read(path).chat_template == "old"
    assert checkpoints.read(path).eos_token_ids == (7,)
    assert checkpoints.read(folder(chat_template={"chat_template": "newer"})).chat_template == "newer"


def test_what_is_missing_is_said(folder, tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        checkpoints.read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoints.read(tmp_path)
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        checkpoints.read(folder(config={}))
    checkpoint = checkpoints.read(folder(preprocessor_config={"a": 1}))
    assert checkpoint.eos_token_ids == ()
    assert checkpoint.image_processor == ""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = checkpoint.tokenizer_file


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "list"), ("\ud800", None)])
def test_malformed_files_are_named(folder, tmp_path, text, message):
    if message is None:
        (tmp_path / "config.json").write_bytes(b"\xff\xfe")
        message = "not valid JSON"
    else:
        folder(config=text)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        checkpoints.read(tmp_path)


def templates(path):
    checkpoint = checkpoints.read(path)
    return checkpoint.chat_template, checkpoint.tool_template


def test_templates_come_from_where_transformers_and_engines_take_them(folder, tmp_path):
    """Each file wins over those before it."""
    path = folder(config={}, preprocessor_config={"a": 1})
    assert templates(path) == (None, None)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder(tokenizer_config={"chat_template": named})
    assert templates(path) == ("D", "T")
    folder(tokenizer_config={"chat_template": {"default": "D", "rag": "R"}})
    assert templates(path) == ("D", "D")
    folder(tokenizer_config={"chat_template": "tokenizer's"}, chat_template__jinja="file's")
    assert templates(path) == ("file's", "file's")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("tools'")
    assert templates(path) == ("file's", "tools'")
    folder(chat_template={"chat_template": "older file's"})
    assert templates(path) == ("older file's", "tools'")
    folder(processor_config={"chat_template": "processor's"})
    assert templates(path) == ("processor's", "tools'")


def test_a_template_of_the_processor_alone_is_for_tools_too(folder):
    assert templates(folder(config={}, preprocessor_config={"a": 1}, chat_template={"chat_template": "A"})) == (
        "A",
        "A",
    )


@pytest.mark.parametrize(
    "template", [3, [{"name": "default"}], ["a"], {"default": None}, [{"name": 1, "template": "x"}]]
)
def test_a_template_that_is_none(folder, template):
    path = folder(config={}, preprocessor_config={"a": 1}, tokenizer_config={"chat_template": template})
    with pytest.raises(CheckpointError, match="neither a text nor several texts by name"):
        checkpoints.read(path)
