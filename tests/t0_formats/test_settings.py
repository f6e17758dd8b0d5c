"""Settings: sources and their order, refusals, units."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import BadInput
from dsecfs.settings import SPECS, Settings, load, parse_duration, parse_size, shown


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def environ(config: Path | None = None, **more: str) -> dict[str, str]:
    return {"DSEC_CONFIG": str(config) if config else "", **more}


def test_later_sources_win_and_each_value_knows_where_it_came_from(config: Path) -> None:
    config.write_text('store = "file:/srv/a"\nfetch_threads = 8\nread_deadline_s = "20s"\n')
    loaded = load(
        [("read_deadline_s", "10s")],
        environ(config, DSEC_FETCH_THREADS="16", DSEC_READ_DEADLINE_S="15", HOME="/root"),
    )
    assert loaded.settings.store == "file:/srv/a"
    assert loaded.settings.fetch_threads == 16
    assert loaded.settings.read_deadline_s == 10
    assert loaded.origins["store"] == str(config)
    assert loaded.origins["fetch_threads"] == "$DSEC_FETCH_THREADS"
    assert loaded.origins["read_deadline_s"] == "command line"
    assert loaded.origins["codec"] == "default"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('stroe = "file:/x"', ("unknown setting 'stroe'", "did you mean store?")),
        ("fetch_threads = 0", ("fetch_threads", "out of range", "1 to 512")),
        ('fetch_threads = "many"', ("fetch_threads", "not a whole number")),
        ('cache_max_bytes = "20 parsecs"', ("cache_max_bytes", "not a size", "20GiB")),
        ('mode = "fast"', ("mode", "'fast' is not allowed", "auto, kernel, loop or fuse")),
        ("prefetch = 7", ("prefetch", "true or false")),
        ("[cache]\nmax = 1", ("cache is a dict", "one line for each setting")),
        ('data_dir = "here"', ("data_dir", "not an absolute path")),
        ("store = [", ("configuration file",)),
        ("cache_low = 0.9\ncache_high = 0.5", ("cache_low", "is more than cache_high")),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_in_one_line(
    config: Path, content: str, words: tuple[str, ...]
) -> None:
    config.write_text(content)
    with pytest.raises(BadInput) as caught:
        load([], environ(config))
    text = str(caught.value)
    assert "\n" not in text and str(config) in text
    assert all(word in text for word in words), text


def test_unknown_variables_are_refused_and_others_are_left_alone() -> None:
    with pytest.raises(BadInput, match=r"unknown setting 'stor' \(\$DSEC_STOR\)"):
        load([], environ(DSEC_STOR="x"))
    load([], environ(DSEC_QUICKSTART_DIR="/x", DSECRET="y", PATH="/bin"))


def test_a_configuration_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load([], environ(tmp_path / "none.toml"))


def test_the_user_file_is_read_without_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "dsec" / "config.toml"
    path.parent.mkdir()
    path.write_text('codec = "zstd"\n')
    loaded = load([], {"XDG_CONFIG_HOME": str(tmp_path)})
    assert (loaded.settings.codec, loaded.origins["codec"]) == ("zstd", str(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("20GiB", 20 << 30),
        ("20 GiB", 20 << 30),
        ("1.5K", 1536),
        ("3M", 3 << 20),
        ("2kB".replace("k", "K"), 2000),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("30s", 30), ("500ms", 0.5), ("2h", 7200), ("1.5 m", 90), ("7", 7)]
)
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text) == value


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    for parse in (parse_size, parse_duration):
        try:
            assert parse(text) >= 0
        except BadInput as e:
            assert "\n" not in str(e)


@given(st.sampled_from(sorted(SPECS)), st.text(max_size=40))
def test_any_text_for_any_setting_is_taken_or_refused_by_name(name: str, text: str) -> None:
    try:
        loaded = load([(name, text)], environ())
    except BadInput as e:
        assert name in str(e) and "command line" in str(e)
        return
    assert loaded.origins[name] == "command line"


def test_defaults_are_within_their_own_ranges_and_can_be_written_to_a_file(config: Path) -> None:
    defaults = Settings()
    lines = []
    for name in SPECS:
        value = getattr(defaults, name)
        lines.append(f'{name} = "{shown(value)}"')
    config.write_text("\n".join(lines))
    tomllib.loads(config.read_text())
    assert load([], environ(config)).settings == defaults


def test_s3_settings_become_part_of_the_url_unless_it_says_them() -> None:
    settings = Settings(store="s3://bucket/p", s3_endpoint="http://h:1", s3_path_style="true")
    assert settings.store_url == "s3://bucket/p?endpoint=http://h:1&path_style=true"
    settings = Settings(store="s3://bucket/p?endpoint=http://own", s3_endpoint="http://h:1")
    assert settings.store_url == "s3://bucket/p?endpoint=http://own"
    assert Settings(store="file:/x", s3_endpoint="http://h:1").store_url == "file:/x"


def test_credentials_in_a_url_are_not_shown() -> None:
    assert shown("http://user:secret@host/x") == "http://***@host/x"
    assert shown("s3://bucket/prefix?endpoint=http://h") == "s3://bucket/prefix?endpoint=http://h"
