"""Settings come from flags, variables and a file, in this order, and no unknown name passes."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pydantic
import pytest

from service.engine.config import EngineConfig
from service.errors import SettingsError
from service.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No LACUNAR_ variable of the caller's shell."""
    for variable in list(os.environ):
        if variable.startswith("LACUNAR_"):
            monkeypatch.delenv(variable)


@pytest.fixture
def toml(tmp_path):
    """Writes a settings file."""

    def write(text: str) -> Path:
        path = tmp_path / "lacunar.toml"
        path.write_text(text)
        return path

    return write


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(monkeypatch, toml):
    file = toml('model = "/file"\nport = 1\nmax_queue = 1\nthreads = 1\n')
    monkeypatch.setenv("LACUNAR_PORT", "2")
    monkeypatch.setenv("LACUNAR_MAX_QUEUE", "2")

    settings = load_settings({"port": 3, "max_queue": None}, file)

    assert (settings.port, settings.max_queue, settings.threads) == (3, 2, 1)
    assert settings.model == Path("/file")
    assert settings.host == "127.0.0.1"


def test_the_file_may_be_named_by_a_variable(monkeypatch, toml):
    monkeypatch.setenv("LACUNAR_CONFIG", str(toml('model = "/m"\nenable_prefix_caching = false')))

    assert load_settings({}).enable_prefix_caching is False


@pytest.mark.parametrize(
    ("flags", "variables", "text", "words"),
    [
        ({}, {}, "", ["model is not set", "LACUNAR_MODEL"]),
        ({"model": "m"}, {"LACUNAR_PROT": "1"}, "", ["LACUNAR_PROT", "did you mean LACUNAR_PORT"]),
        ({"model": "m"}, {"LACUNAR_PORT": "x"}, "", ["LACUNAR_PORT", "integer", "'x'"]),
        ({"model": "m", "port": 70000}, {}, "", ["--port", "65535", "70000"]),
        ({"model": "m"}, {}, "prot = 1", ["lacunar.toml", "'prot'", "did you mean port"]),
        ({"model": "m"}, {}, "port = -1", ["lacunar.toml: port", "-1"]),
        ({"model": "m"}, {}, "port = ", ["lacunar.toml", "not a valid TOML"]),
        ({"model": "m"}, {"LACUNAR_DTYPE": "int8"}, "", ["LACUNAR_DTYPE", "bfloat16"]),
        ({"model": "m"}, {"LACUNAR_DEVICE": "gpu"}, "", ["LACUNAR_DEVICE", "cuda"]),
        ({"model": "m"}, {"LACUNAR_DRAIN_SECONDS": "nan"}, "", ["LACUNAR_DRAIN_SECONDS"]),
        ({"model": "m"}, {"LACUNAR_SERVICE_HOST": "10.0.0.1"}, "", ["enableServiceLinks: false"]),
        ({"model": "m"}, {"LACUNAR_PORT_8000_TCP": "x"}, "", ["enableServiceLinks: false"]),
    ],
)
def test_a_mistake_is_named_where_it_was_made(monkeypatch, toml, flags, variables, text, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError) as caught:
        load_settings(flags, toml(text))

    for word in words:
        assert word in caught.value.message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load_settings({"model": "m"}, tmp_path / "nowhere.toml")


@pytest.mark.parametrize("key", ["", "a b", "ключ"])
def test_an_unusable_key_is_refused_and_never_shown(key):
    with pytest.raises(SettingsError) as caught:
        load_settings({"model": "m", "api_key": key})

    assert "API key" in caught.value.message
    assert "got" not in caught.value.message


def test_a_key_does_not_show_when_settings_are_printed():
    assert "s3cret" not in repr(load_settings({"model": "m", "api_key": "s3cret"}))


def test_settings_cannot_be_changed():
    settings = load_settings({"model": "m"})

    with pytest.raises(pydantic.ValidationError):
        settings.port = 1


def test_every_engine_setting_reaches_the_engine():
    values = {
        "device": "cuda:1", "dtype": "float16", "weights": "dense", "implementation": "native",
        "max_model_len": 100, "max_num_sequences": 3, "max_step_tokens": 77, "max_queue": 5,
        "kv_block_size": 32, "kv_cache_bytes": 12345, "gpu_memory_utilization": 0.5, "cuda_graphs": False,
        "enable_prefix_caching": False, "seed": 9, "threads": 2, "log_format": "json",
    }  # fmt: skip
    config = load_settings({"model": "/m", **values}).engine_config()

    assert config == EngineConfig(model="/m", **values)
    assert set(EngineConfig.__struct_fields__) - set(values) == {"model", "model_factory"}


def test_the_engines_defaults_are_the_settings_defaults():
    assert load_settings({"model": "/m"}).engine_config() == EngineConfig(model="/m")


def test_a_gpus_steps_take_more_tokens():
    assert load_settings({"model": "/m", "device": "cuda"}).engine_config().max_step_tokens == 2048


def test_values_that_do_not_fit_together_are_refused():
    settings = load_settings({"model": "m", "max_num_sequences": 64, "max_step_tokens": 8})

    with pytest.raises(SettingsError, match="max_step_tokens"):
        settings.engine_config()


def test_every_setting_has_a_flag():
    from service.cli import serve

    assert set(inspect.signature(serve).parameters) - {"context", "config"} == set(Settings.model_fields)


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_the_flags_help_names_the_settings_default(name):
    """The command line's help is static, so that it is quick; it must not drift from the defaults."""
    from service.cli import serve

    default = Settings.model_fields[name].default
    parameter = inspect.signature(serve, eval_str=True).parameters[name]
    help_text = parameter.annotation.__metadata__[0].help
    if isinstance(default, bool):
        assert f"Default: {'on' if default else 'off'}." in help_text
    elif name == "max_body_bytes":
        assert default == 4 * 1024**2
        assert "Default 4 MiB." in help_text
    elif isinstance(default, str):
        assert f"Default {default}" in help_text
    elif isinstance(default, int | float):
        assert f"Default {default}." in help_text or f"Default {default:g}." in help_text
