"""Settings: precedence of the sources, and validation errors that name the source."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.config import ServerConfig, served_names
from server.images.addresses import ImageAddresses
from server.settings import human_size, load, settings


def test_settings_have_unique_names_panels_and_descriptions() -> None:
    every = list(settings())
    assert len({setting.name for setting in every}) == len(every)
    for setting in every:
        assert setting.fact("title")
        assert setting.fact("description")


def test_settings_defaults_pass_their_own_validation() -> None:
    for setting in settings():
        value = msgspec.to_builtins(setting.default)
        assert msgspec.convert(value, setting.annotation) == setting.default


def test_load_prefers_flag_then_environment_then_file_then_default(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nthreads: 1\n")
    environ = {"PENSTOCK_PORT": "2", "PENSTOCK_MAX_NUM_SEQS": "2", "HOME": "/"}
    server, engine, warnings = load({"port": "3", "host": None}, environ, file)
    assert (server.port, engine.max_num_seqs, engine.threads) == (3, 2, 1)
    assert server.host == ServerConfig().host
    assert warnings == []


def test_load_reads_the_file_named_by_penstock_config(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("served_model_name: [a, b]\nenable-prefix-caching: false\n")
    server, engine, _ = load({}, {"PENSTOCK_CONFIG": str(file)}, None)
    assert server.served_model_name == ("a", "b")
    assert engine.enable_prefix_caching is False


def test_load_without_values_returns_the_defaults() -> None:
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
        ({}, {}, "api_key: 1234", ["'***'", "a string or a list of strings", "quote numbers"]),
        ({}, {}, "model: 5", ["yaml: 5 is not a string;", "quote numbers"]),
        ({}, {}, "port:", ["port in ", "None is not a whole number"]),
        (
            {"allowed_origins": ["https://a.b/"]},
            {},
            "",
            ["'https://a.b/'] is not a list of origins as browsers"],
        ),
        ({"chat_template": ""}, {}, "", ["--chat-template: '' is not the path of a file"]),
        ({"served_model_name": ["a", ""]}, {}, "", ["--served-model-name: ['a', ''] is not a li"]),
        ({"model": "x\udcff"}, {}, "", ["--model: 'x\\udcff' is not valid UTF-8."]),
        ({}, {"PENSTOCK_SERVED_MODEL_NAME": "a,\udcff"}, "", ["'\\udcff'] is not valid UTF-8."]),
        ({}, {"PENSTOCK_ALLOWED_ORIGINS": "*,a.b"}, "", ["'a.b'] is not a list of origins as"]),
    ],
)
def test_load_with_invalid_value_names_source_and_allowed_values(
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
def test_load_with_invalid_origin_raises(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        load({"allowed_origins": [origin]}, {}, None)


@pytest.mark.parametrize(
    "origin", ["*", "localhost", "http://localhost:3000", "https://[::1]:8443", "app://obsidian.md"]
)
def test_load_with_origin_as_browsers_send_it_keeps_it(origin: str) -> None:
    config, _, _ = load({"allowed_origins": [origin]}, {}, None)
    assert config.allowed_origins == (origin,)


@pytest.mark.parametrize(
    "hosts",
    [
        *("", "https://a.example", "a.example/", "a b", "a.example:", "*", "*.", "a@b", "a:b"),
        *("fd00::1", "a.example,", ",a.example"),
    ],
)
def test_load_with_invalid_image_host_raises(hosts: str) -> None:
    with pytest.raises(ConfigError, match="--image-hosts"):
        image_addresses(hosts)


def image_addresses(hosts: str) -> tuple[str, ...]:
    """Read one --image-hosts as a server does, and return the setting."""
    config, _, _ = load({"image_hosts": [hosts]}, {}, None)
    ImageAddresses(config.image_hosts)
    return config.image_hosts


@pytest.mark.parametrize(
    "hosts",
    [
        *("a.example", "*.a.example", "a_b", "10.0.0.5", "10.0.0.0/8:9000", "[fd00::/8]"),
        *("[fd00::1]:81", "a.example:81,10.0.0.5,*.b.example"),
    ],
)
def test_load_with_image_hosts_keeps_them(hosts: str) -> None:
    assert image_addresses(hosts) == (hosts,)


def test_load_with_two_invalid_values_reports_both() -> None:
    with pytest.raises(ConfigError) as error:
        load({"port": "x"}, {"PENSTOCK_THREADS": "0"}, None)
    assert len(str(error.value).splitlines()) == 2


def test_load_with_invalid_secret_does_not_print_it(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("api_key: {hunter2: 1}\n")
    with pytest.raises(ConfigError) as error:
        load({}, {}, file)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("max_model_length: 5", ["max_model_length in ", "Did you mean max_model_len?"]),
        ("max-num-seqs: 5\nmax_num_seqs: 6", ["appears twice"]),
        ("port: 8000\nhost: a\n'port': 8001", ["port appears twice, in lines 1 and 3"]),
        ("{port: 8000, port: 8001}", ["port appears twice, in lines 1 and 1"]),
        ("- port", ["must contain", "list"]),
        (
            "model: [a\nport: 3\n",
            ["line 2, column 5, is not valid YAML: expected ',' or ']', but got ':' while parsing"],
        ),
        ("a: b: c", ["line 1, column 5, is not valid YAML: mapping values are not allowed here."]),
        ("a: \x00", ['special characters are not allowed in "<unicode string>", position 3']),
        pytest.param("a: " + "[" * 9999, ["Cannot read the YAML file"], id="deep"),
    ],
)
def test_load_with_faulty_file_raises(tmp_path: Path, yaml: str, words: list[str]) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as error:
        load({}, {}, file)
    for word in [*words, "penstock.yaml"]:
        assert word in str(error.value)


def test_load_with_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load({}, {}, tmp_path / "missing.yaml")


def test_load_with_unknown_variables_raises_with_hints() -> None:
    environ = {"PENSTOCK_MAX_NUM_SEQ": "5", "PENSTOCK_XYZZY": "1", "OTHER": "2"}
    with pytest.raises(ConfigError) as error:
        load({}, environ, None)
    assert "PENSTOCK_MAX_NUM_SEQ is not a setting. Did you mean PENSTOCK_MAX_NUM_SEQS?" in str(
        error.value
    )
    assert "PENSTOCK_XYZZY is not a setting." in str(error.value)


def test_load_ignores_unknown_variables_that_are_empty() -> None:
    """Compose files set an empty variable for a value that was not given."""
    assert load({}, {"PENSTOCK_MAX_NUM_SEQ": ""}, None)[0] == ServerConfig()


def test_load_ignores_kubernetes_service_link_variables() -> None:
    links = {
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_SERVICE_PORT_HTTP": "8000",
        "PENSTOCK_PORT": "tcp://10.0.0.1:8000",
        "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PENSTOCK_GATEWAY_SERVICE_HOST": "10.0.0.2",
        "PENSTOCK_GATEWAY_SERVICE_PORT": "80",
        "PENSTOCK_GATEWAY_PORT": "tcp://10.0.0.2:80",
        "PENSTOCK_GATEWAY_PORT_80_TCP": "tcp://10.0.0.2:80",
        "PENSTOCK_GATEWAY_PORT_80_TCP_PROTO": "tcp",
    }
    assert load({}, links, None) == (ServerConfig(), EngineConfig(), [])


def test_load_with_secret_on_the_command_line_warns() -> None:
    server, _, warnings = load({"api_key": ["s3cret"]}, {}, None)
    assert server.api_key == ("s3cret",)
    assert "PENSTOCK_API_KEY" in warnings[0]
    assert "s3cret" not in warnings[0]
    assert load({}, {"PENSTOCK_API_KEY": "a, b"}, None)[0].api_key == ("a", "b")


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_load_with_empty_api_key_raises(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_API_KEY is set but empty"):
        load({}, {"PENSTOCK_API_KEY": text}, None)
    if not text.strip():
        with pytest.raises(ConfigError, match="--api-key is set but empty"):
            load({"api_key": ["good", text]}, {}, None)
    (tmp_path / "c.yaml").write_text("api_key: ['']\n")
    with pytest.raises(ConfigError, match=r"api_key in .* is set but empty"):
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
def test_human_size_with_suffix_returns_bytes(text: str, number: int) -> None:
    assert human_size(text) == str(number)
    assert load({"kv_cache_memory_bytes": text}, {}, None)[1].kv_cache_memory_bytes == number


def test_load_with_size_suffix_in_the_wrong_place_raises() -> None:
    with pytest.raises(ConfigError, match="--port"):
        load({"port": "8k"}, {}, None)
    with pytest.raises(ConfigError, match="--max-model-len: '99999"):
        load({"max_model_len": "9" * 400 + "k"}, {}, None)
    with pytest.raises(ConfigError, match="32k, 32K and 2GiB are accepted"):
        load({"max_model_len": "12x"}, {}, None)


def test_served_names_default_to_the_folder_name() -> None:
    assert served_names(ServerConfig(), "/models/Qwen3-0.6B/") == ("Qwen3-0.6B",)
    assert served_names(ServerConfig(), "demo") == ("demo",)
    assert served_names(ServerConfig(served_model_name=("a", "b")), "demo") == ("a", "b")
