"""Every setting by flag, by variable and by file, and a document that tells of all of them."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pixelgate import cli
from pixelgate.errors import ConfigError
from pixelgate.gateway import configure as configuration
from pixelgate.gateway import supervisor
from pixelgate.gateway.configure import Setting, add_flags, configure, settings
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.media.policy import MediaPolicy

MODELS = (ModelSettings("/models/qwen", ("local:reader",)),)
ALL = list(settings())
# A value for each setting that is not its default, where the rule below would make an impossible one.
OTHER = {
    "shm": "off",
    "log_level": "debug",
    "log_format": "json",
    "trace_endpoint": "https://collector:4318/v1/traces",
    "trace_sample": 0.25,
    "host": "0.0.0.0",
    "admin_host": "127.0.0.1:9",
    "trusted_proxies": ("10.0.0.0/8", "192.0.2.1"),
    "tls_cert": "/cert.pem",
    "tls_key": "/key.pem",
    "schemes": ("https", "data"),
    "formats": ("PNG", "JPEG"),
    "allow_private": ("images.internal", "10.0.0.0/8"),
    "egress_proxy": "http://proxy:3128",
    "allowed_domains": ("images.example", "*.cdn.example"),
    "background": "#102030",
    "isolate": ("PNG", "TIFF"),
    "rgb": "hf",
    "special_tokens_in_text": "allow",
    "api_keys": ("sk-one", "sk-two"),
}


def other(setting):
    """Another value than the default."""
    if setting.name in OTHER:
        return OTHER[setting.name]
    if setting.kind == "bool":
        return not setting.default
    made = {"int": int, "float": float}.get(setting.kind, str)
    return made(setting.default + 1 if setting.kind in ("int", "float") else f"/{setting.name}")


def texts(setting, value):
    return list(value) if isinstance(value, tuple) else str(value)


def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def value_of(configured, setting):
    return getattr(configured.media if setting.section is MediaPolicy else configured, setting.name)


def beside(setting, how):
    """What a setting is of no use without, said in the same way."""
    pair = {"tls_cert": "tls_key", "tls_key": "tls_cert"}.get(setting.name)
    return {how(each): OTHER[pair] for each in ALL if each.name == pair}


@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.flag)
def test_every_setting_can_be_said_in_every_way(setting, tmp_path):
    value = other(setting)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = texts(setting, value)
    line = [part for text in (given if isinstance(given, list) else [given]) for part in (setting.flag, text)]
    if setting.kind == "bool":
        line = [setting.flag if value else setting.flag.replace("--", "--no-")]
    for flag, text in beside(setting, lambda each: each.flag).items():
        line += [flag, text]
    by_flag = configure(models=MODELS, flags=vars(parser.parse_args(line)))
    assert value_of(by_flag, setting) == value

    said = value[:1] if setting.name == "api_keys" else value
    text = ",".join(said) if isinstance(said, tuple) else str(said)
    environment = {setting.variable: text, **beside(setting, lambda each: each.variable)}
    assert value_of(configure(models=MODELS, environment=environment), setting) == said

    file = tmp_path / "pixelgate.toml"
    table = "[media]\n" if setting.section is MediaPolicy else ""
    more = "".join(f"{name} = {toml(text)}\n" for name, text in beside(setting, lambda each: each.name).items())
    file.write_text(f"{table}{setting.name} = {toml(value)}\n{more}" + '[[model]]\ncheckpoint="a"\nengines=["b"]\n')
    assert value_of(configure(file=file), setting) == value


def test_names_are_told_apart():
    assert len({setting.flag for setting in ALL}) == len({setting.variable for setting in ALL}) == len(ALL)
    names = {setting.name: (setting.flag, setting.variable) for setting in ALL}
    assert names["max_pixels"] == ("--media-max-pixels", "PIXELGATE_MEDIA_MAX_PIXELS")
    assert names["max_connections"] == ("--max-connections", "PIXELGATE_SERVE_MAX_CONNECTIONS")
    assert names["api_keys"] == ("--api-key", "PIXELGATE_API_KEY")
    assert names["trusted_proxies"][0] == "--trusted-proxy"
    assert names["egress_proxy"] == ("--egress-proxy", "PIXELGATE_MEDIA_EGRESS_PROXY")


def test_the_nearest_to_the_command_wins(tmp_path):
    file = tmp_path / "pixelgate.toml"
    file.write_text('port = 1\nhost = "a"\nthreads = 9\n[[model]]\ncheckpoint="a"\nengines=["b"]\n')
    environment = {"PIXELGATE_SERVE_PORT": "2", "PIXELGATE_SERVE_HOST": "b", "PIXELGATE_PORT": "tcp://10.0.0.1:80"}
    found = configure(file=file, flags={"--port": "3"}, environment=environment)
    assert (found.port, found.host, found.threads, found.max_queue) == (3, "b", 9, GatewaySettings(MODELS).max_queue)
    assert found.models[0].checkpoint == "a"


def test_a_list_replaces_a_list(tmp_path):
    file = tmp_path / "pixelgate.toml"
    file.write_text('api_keys = ["sk-file"]\n[[model]]\ncheckpoint="a"\nengines=["b"]\n')
    assert configure(file=file).api_keys == ("sk-file",)
    assert configure(file=file, environment={"PIXELGATE_API_KEY": "sk,env"}).api_keys == ("sk,env",)
    flags = {"--api-key": ["sk-1", "sk-2"]}
    assert configure(file=file, flags=flags, environment={"PIXELGATE_API_KEY": "sk-env"}).api_keys == ("sk-1", "sk-2")


def test_the_command_line_is_where_the_environment_is_read(monkeypatch):
    seen = []
    monkeypatch.setattr(supervisor, "run", lambda read: seen.append(read()))
    monkeypatch.setenv("PIXELGATE_API_KEY", "sk-env")
    monkeypatch.setenv("PIXELGATE_MEDIA_MAX_IMAGES", "3")
    line = ["serve", "/models/qwen", "--engine", "local:reader", "--media-schemes", "data", "--media-schemes", "https"]
    assert cli.main(line) == 0
    assert (seen[0].api_keys, seen[0].media.max_images) == (("sk-env",), 3)
    assert seen[0].media.schemes == ("data", "https")
    assert configure(models=MODELS) == GatewaySettings(MODELS)


@pytest.mark.parametrize(
    ("flags", "environment", "reason"),
    [
        ({"--port": "http"}, {}, "--port must be a whole number, not 'http'"),
        ({"--port": "1.5"}, {}, "--port must be a whole number, not '1.5'"),
        ({"--port": "70000"}, {}, "--port: port must be between 0 and 65535, not 70000"),
        ({"--header-timeout": "soon"}, {}, "--header-timeout must be a number, not 'soon'"),
        (
            {"--header-timeout": "0"},
            {},
            "--header-timeout: header_timeout must be a number of seconds above 0, not 0.0",
        ),
        ({"--body-timeout": "inf"}, {}, "--body-timeout: body_timeout must be a number of seconds above 0, not inf"),
        ({"--media-rgb": "bgr"}, {}, '--media-rgb: rgb must be "pixelgate" or "hf", not \'bgr\''),
        ({"--media-formats": ["PSD"]}, {}, "--media-formats: formats does not know 'PSD'"),
        ({"--trusted-proxy": ["proxy"]}, {}, "--trusted-proxy: trusted_proxies must be networks"),
        ({"--admin-host": "x"}, {}, "--admin-host: admin_host must be HOST:PORT or PORT, not 'x'"),
        ({"--tls-cert": "a.pem"}, {}, "--tls-cert: tls_cert is of no use without tls_key"),
        ({"--tls-key": "a.pem"}, {}, "--tls-key: tls_key is of no use without tls_cert"),
        ({"--egress-proxy": "x:s3cret"}, {}, "--egress-proxy: egress_proxy must be a URL such as"),
        ({"--api-key": ["s3cret key"]}, {}, "--api-key: key 1 of api_keys has a blank"),
        ({"--api-key": ["good", ""]}, {}, "--api-key: key 2 of api_keys is empty"),
        (
            {},
            {"PIXELGATE_SERVE_TRUST_REQUEST_MM_KWARGS": "1"},
            "PIXELGATE_SERVE_TRUST_REQUEST_MM_KWARGS must be true or false, not '1'",
        ),
        ({}, {"PIXELGATE_API_KEY": ""}, "PIXELGATE_API_KEY is empty; leave it out for the default"),
        ({"--api-key": [""]}, {}, "--api-key is empty; leave it out for the default"),
        ({"--api-key-file": ""}, {}, "--api-key-file is empty; leave it out for the default"),
        ({}, {"PIXELGATE_SERVE_API_KEY_FILE": ""}, "PIXELGATE_SERVE_API_KEY_FILE is empty"),
        ({}, {"PIXELGATE_SERVE_ADMIN_HOST": ""}, "PIXELGATE_SERVE_ADMIN_HOST is empty"),
        ({}, {"PIXELGATE_API_KEY": "s3cret key"}, "PIXELGATE_API_KEY: key 1 of api_keys has a blank"),
        ({}, {"PIXELGATE_SERVE_WORKERS": ""}, "PIXELGATE_SERVE_WORKERS is empty"),
        ({}, {"PIXELGATE_SERVE_THREADS": "0"}, "PIXELGATE_SERVE_THREADS: threads must be at least 1, not 0"),
        ({}, {"PIXELGATE_MEDIA_MAX_BYTES": "1e6"}, "PIXELGATE_MEDIA_MAX_BYTES must be a whole number, not '1e6'"),
        ({}, {"PIXELGATE_MEDIA_ALLOW_PRIVATE": "a,,b"}, "PIXELGATE_MEDIA_ALLOW_PRIVATE: allow_private: '' is neither"),
        ({}, {"PIXELGATE_MEDIA_SCHEMES": ""}, "PIXELGATE_MEDIA_SCHEMES is empty"),
        ({}, {"PIXELGATE_MEDIA_SCHEMES": "http,"}, "PIXELGATE_MEDIA_SCHEMES: schemes does not know ''"),
    ],
)
def test_mistakes_are_named_with_the_flag_or_the_variable(flags, environment, reason):
    with pytest.raises(ConfigError) as caught:
        configure(models=MODELS, flags=flags, environment=environment)
    assert caught.value.message.startswith(reason)
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize("written", ['"s3cret"', '["s3cret key"]', "[3]"])
def test_a_file_with_a_wrong_key_does_not_show_it(tmp_path, written):
    file = tmp_path / "pixelgate.toml"
    file.write_text(f'api_keys = {written}\n[[model]]\ncheckpoint="a"\nengines=["b"]\n')
    with pytest.raises(ConfigError, match=r"pixelgate\.toml: .*api_keys") as caught:
        configure(file=file)
    assert "s3cret" not in caught.value.message


def test_a_switch_has_two_flags():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    for flag, value in (("--trust-request-mm-kwargs", True), ("--no-trust-request-mm-kwargs", False)):
        environment = {"PIXELGATE_SERVE_TRUST_REQUEST_MM_KWARGS": str(not value)}
        flags = vars(parser.parse_args([flag]))
        assert configure(models=MODELS, flags=flags, environment=environment).trust_request_mm_kwargs is value
        assert configure(models=MODELS, environment=environment).trust_request_mm_kwargs is not value


def test_every_setting_has_a_type_that_is_checked_somewhere():
    """A setting of a new type would pass unchecked: the type belongs into configure.py, or its class checks it."""
    by_their_class = {"rgb", "backend", "bos", "special_tokens_in_text", "shm", "balance", "log_level", "log_format"}
    every = [*ALL, *(Setting(ModelSettings, field) for field in fields(ModelSettings))]
    assert {setting.name for setting in every if setting.kind not in configuration._WORDS} <= by_their_class


def test_help_tells_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    for setting in ALL:
        assert f"{setting.flag} " in shown


# The document


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}


def documented(cell, setting):
    """The value that a cell of the table means."""
    if cell == "the cores":
        return len(os.sched_getaffinity(0))
    if setting.kind == "tuple[str, ...]":
        return () if cell == "none" else tuple(cell.split(", "))
    if setting.kind in ("int", "float"):
        number, _, unit = cell.replace(",", "").partition(" ")
        return float(number) * UNITS[unit] if unit else float(number)
    if setting.kind == "bool":
        return cell == "true"
    return "" if cell == "none" else cell


def test_the_document_has_every_setting_with_its_default():
    text = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]{4,}) \|$", text, re.M)
    told = [name for name, *_ in rows]
    known = {setting.name: setting for setting in ALL}
    assert len(known) == len(ALL)
    assert sorted(told) == sorted(known)
    for name, cell, words in rows:
        assert documented(cell, known[name]) == known[name].default, name
        # the text in the source, and perhaps where there is more: scripts/tell_settings.py writes it
        assert re.sub(r" \(\[[^]]+\]\([^)]+\)\)$", "", words) == known[name].explanation.replace("``", "`"), name
    for setting in ALL:
        if setting.flag not in (f"--{setting.name.replace('_', '-')}", f"--media-{setting.name.replace('_', '-')}"):
            assert f"`{setting.flag}`" in text
    assert "`PIXELGATE_API_KEY`" in text


def test_none_is_the_empty_list():
    by_flag = configure(models=MODELS, flags={"--media-isolate": ["none"]})
    by_variable = configure(models=MODELS, environment={"PIXELGATE_MEDIA_ISOLATE": "none"})
    assert by_flag.media.isolate == by_variable.media.isolate == ()
    assert configure(models=MODELS).media.isolate


def test_the_help_says_what_each_setting_is_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for setting in ALL:
        assert f"{setting.explanation.replace('``', '')} (default: " in told
    assert "--media-max-images N Pictures in one request. (default: 32) --media-max-url-length N" in told


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PIXELGATE_SERVE_MAX_BODY_BITES", "did you mean PIXELGATE_SERVE_MAX_BODY_BYTES"),
        ("PIXELGATE_MAX_PIXELS", "did you mean PIXELGATE_MEDIA_MAX_PIXELS"),
        ("PIXELGATE_PORT", "did you mean PIXELGATE_SERVE_PORT"),
        ("PIXELGATE_SERVE_API_KEYS", "did you mean PIXELGATE_"),
        ("PIXELGATE_ISSA", "did you mean PIXELGATE_ISA"),
        ("PIXELGATE_ZZZ", "docs/gateway.md has all"),
    ],
)
def test_a_variable_that_nothing_reads_is_refused(name, meant):
    with pytest.raises(ConfigError, match=f"no setting has the variable {name}; {meant}") as caught:
        configure(models=MODELS, environment={"PATH": "/bin", name: "sk-9000"})
    assert "sk-9000" not in caught.value.message


def test_variables_of_others_are_left_alone():
    environment = {
        "PIXELGATE_ISA": "portable",
        "PIXELGATE_CXXFLAGS": "-g",
        "PIXELGATE": "1",
        "MY_PIXELGATE_HOST": "x",
        "PIXELGATE_PORT": "tcp://10.0.0.1:8080",
        "PIXELGATE_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "PIXELGATE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "PIXELGATE_SERVICE_HOST": "10.0.0.1",
        "PIXELGATE_SERVICE_PORT_HTTP": "8080",
        "PIXELGATE_ADMIN_SERVICE_PORT": "9090",
    }
    assert configure(models=MODELS, environment=environment) == configure(models=MODELS)
