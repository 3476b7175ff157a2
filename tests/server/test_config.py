"""Layers of settings: precedence, validation with the source named, one declaration per fact."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.config import ServerConfig, served_names
from server.settings import human_size, load, settings


def test_every_field_has_a_name_of_its_own_a_panel_and_a_description() -> None:
    every = list(settings())
    assert len({setting.name for setting in every}) == len(every)
    for setting in every:
        assert setting.fact("title")
        assert setting.fact("description")


def test_defaults_pass_the_validation_of_their_own_fields() -> None:
    for setting in settings():
        value = msgspec.to_builtins(setting.default)
        assert msgspec.convert(value, setting.annotation) == setting.default


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nthreads: 1\n")
    environ = {"PENSTOCK_PORT": "2", "PENSTOCK_MAX_NUM_SEQS": "2", "HOME": "/"}
    server, engine, warnings = load({"port": "3", "host": None}, environ, file)
    assert (server.port, engine.max_num_seqs, engine.threads) == (3, 2, 1)
    assert server.host == ServerConfig().host
    assert warnings == []


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("served_model_name: [a, b]\nenable-prefix-caching: false\n")
    server, engine, _ = load({}, {"PENSTOCK_CONFIG": str(file)}, None)
    assert server.served_model_name == ("a", "b")
    assert engine.enable_prefix_caching is False


def test_nothing_given_gives_the_defaults() -> None:
    assert load({}, {}, None) == (ServerConfig(), EngineConfig(), [])


@pytest.mark.parametrize(
    ("flags", "environ", "yaml", "words"),
    [
        ({"port": "99999"}, {}, "", ["--port: '99999'", "at least 0 and at most 65535"]),
        ({"threads": "99999"}, {}, "", ["--threads: '99999'", "at least 1 and at most 1024"]),
        ({"max_num_batched_tokens": "1g"}, {}, "", ["'1g'", "at least 1 and at most 16777216"]),
        ({"max_model_len": "4g"}, {}, "", ["--max-model-len: '4g'", "at most 16777216"]),
        ({"dtype": "fp8"}, {}, "", ["--dtype: 'fp8'", "one of auto, float32, bfloat16"]),
        ({"block_size": "33"}, {}, "", ["--block-size", "one of 16, 32, 64, 128"]),
        ({}, {"PENSTOCK_MAX_NUM_SEQS": "many"}, "", ["PENSTOCK_MAX_NUM_SEQS: 'many'", "whole"]),
        ({}, {"PENSTOCK_SEND_TIMEOUT": "0"}, "", ["PENSTOCK_SEND_TIMEOUT", "number above 0"]),
        ({}, {"PENSTOCK_PREPACK": "perhaps"}, "", ["PENSTOCK_PREPACK", "true or false"]),
        ({"drain_timeout": "inf"}, {}, "", ["--drain-timeout: 'inf' is not a finite number"]),
        ({}, {"PENSTOCK_STALL_TIMEOUT": "nan"}, "", ["PENSTOCK_STALL_TIMEOUT: 'nan' is not a"]),
        ({}, {}, "drain_timeout: .inf", ["drain_timeout in ", "inf is not a finite number at"]),
        ({}, {}, "max_model_len: 0", ["max_model_len in ", "penstock.yaml: 0", "at least 1"]),
        ({}, {}, "api_key: 1234", ["'***'", "a text or a list of texts", "number needs quotes"]),
        ({}, {}, "model: 5", ["yaml: 5 is not a text;", "number needs quotes"]),
        ({}, {}, "port:", ["port in ", "None is not a whole number"]),
        (
            {"allowed_origins": ["https://a.b/"]},
            {},
            "",
            ["'https://a.b/'] is not origins as browsers"],
        ),
        ({"chat_template": ""}, {}, "", ["--chat-template: '' is not the path of a file"]),
        ({"served_model_name": ["a", ""]}, {}, "", ["--served-model-name: ['a', ''] is not texts"]),
        ({"model": "x\udcff"}, {}, "", ["--model: 'x\\udcff' is no UTF-8."]),
        ({}, {"PENSTOCK_SERVED_MODEL_NAME": "a,\udcff"}, "", ["'\\udcff'] is no UTF-8."]),
        ({}, {"PENSTOCK_ALLOWED_ORIGINS": "*,a.b"}, "", ["'a.b'] is not origins as browsers"]),
    ],
)
def test_a_wrong_value_is_reported_with_its_source_and_what_is_allowed(
    tmp_path: Path,
    flags: dict[str, str],
    environ: dict[str, str],
    yaml: str,
    words: list[str],
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as error:
        load(flags, environ, file)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "origin",
    [
        *("https://*.example.com", "https://Chat.Example", "https://u:p@h", "https://a.b?x"),
        *("https://chat.example:443", "http://chat.example:80", "http://a.b\n", "null", ""),
    ],
)
def test_what_no_browser_calls_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        load({"allowed_origins": [origin]}, {}, None)


@pytest.mark.parametrize(
    "origin", ["*", "http://localhost:3000", "https://[::1]:8443", "app://obsidian.md"]
)
def test_origins_as_browsers_send_them(origin: str) -> None:
    config, _, _ = load({"allowed_origins": [origin]}, {}, None)
    assert config.allowed_origins == (origin,)


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load({"port": "x"}, {"PENSTOCK_THREADS": "0"}, None)
    assert len(str(error.value).splitlines()) == 2


def test_a_wrong_secret_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("api_key: {hunter2: 1}\n")
    with pytest.raises(ConfigError) as error:
        load({}, {}, file)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("max_model_length: 5", ["max_model_length in ", "Did you mean max_model_len?"]),
        ("max-num-seqs: 5\nmax_num_seqs: 6", ["stands twice"]),
        ("port: 8000\nhost: a\n'port': 8001", ["port stands twice, in lines 1 and 3"]),
        ("{port: 8000, port: 8001}", ["port stands twice, in lines 1 and 1"]),
        ("- port", ["must hold", "list"]),
        ("port: [", ["Cannot read the YAML file"]),
        pytest.param("a: " + "[" * 9999, ["Cannot read the YAML file"], id="deep"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, yaml: str, words: list[str]) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as error:
        load({}, {}, file)
    for word in [*words, "penstock.yaml"]:
        assert word in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load({}, {}, tmp_path / "missing.yaml")


def test_an_unknown_variable_is_a_warning_with_a_hint() -> None:
    _, _, warnings = load({}, {"PENSTOCK_MAX_NUM_SEQ": "5"}, None)
    assert len(warnings) == 1
    assert "Did you mean PENSTOCK_MAX_NUM_SEQS?" in warnings[0]


def test_the_variables_kubernetes_sets_for_a_service_named_penstock_are_not_settings() -> None:
    links = {
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_SERVICE_PORT_HTTP": "8000",
        "PENSTOCK_PORT": "tcp://10.0.0.1:8000",
        "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load({}, links, None) == (ServerConfig(), EngineConfig(), [])


def test_a_secret_on_the_command_line_is_warned_of() -> None:
    server, _, warnings = load({"api_key": ["s3cret"]}, {}, None)
    assert server.api_key == ("s3cret",)
    assert "PENSTOCK_API_KEY" in warnings[0]
    assert "s3cret" not in warnings[0]
    assert load({}, {"PENSTOCK_API_KEY": "a, b"}, None)[0].api_key == ("a", "b")


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_a_key_that_was_forgotten_does_not_open_the_server(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_API_KEY is set, but to nothing"):
        load({}, {"PENSTOCK_API_KEY": text}, None)
    if not text.strip():
        with pytest.raises(ConfigError, match="--api-key is set, but to nothing"):
            load({"api_key": ["good", text]}, {}, None)
    (tmp_path / "c.yaml").write_text("api_key: ['']\n")
    with pytest.raises(ConfigError, match=r"api_key in .* is set, but to nothing"):
        load({}, {}, tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("32k", 32000),
        ("32K", 32768),
        ("1.5k", 1500),
        ("2GiB", 2 * 1024**3),
        ("2gb", 2 * 1000**3),
        ("16 MiB", 16 * 1024**2),
        ("3Ki", 3072),
    ],
)
def test_sizes_for_people(text: str, number: int) -> None:
    assert human_size(text) == str(number)
    assert load({"kv_cache_memory_bytes": text}, {}, None)[1].kv_cache_memory_bytes == number


def test_sizes_are_not_understood_where_they_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="--port"):
        load({"port": "8k"}, {}, None)
    with pytest.raises(ConfigError, match="--max-model-len: '99999"):
        load({"max_model_len": "9" * 400 + "k"}, {}, None)
    with pytest.raises(ConfigError, match="32k, 32K and 2GiB are understood"):
        load({"max_model_len": "12x"}, {}, None)


def test_the_served_name_is_the_folders_unless_given() -> None:
    assert served_names(ServerConfig(), "/models/Qwen3-0.6B/") == ("Qwen3-0.6B",)
    assert served_names(ServerConfig(), "demo") == ("demo",)
    assert served_names(ServerConfig(served_model_name=("a", "b")), "demo") == ("a", "b")
