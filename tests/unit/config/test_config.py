"""The configuration: sources and their order, refusals by name, and the numbers that it resolves to."""

from pathlib import Path

import pytest

from kvd import config as c
from kvd import limits
from kvd.config import Amount, Config
from kvd.errors import ConfigError
from kvd.shm import _native

GIB = limits.GIB


def write(tmp_path, text):
    path = tmp_path / "kvd.toml"
    path.write_text(text)
    return path


def test_defaults_need_neither_file_nor_environment():
    config = Config.load(None, {})
    assert config.server.socket == "/run/kvd/kvd.sock"
    assert config.pool.size == Amount(share=0.5)
    assert config.server.metrics_listen == ""


def test_environment_wins_over_the_file_and_the_source_is_known(tmp_path):
    path = write(tmp_path, '[pool]\nsize = "1GiB"\nlock = "no"\n[clients]\nmax = 3\n')
    config = Config.load(
        path, {"KVD_POOL_SIZE": "2GiB", "KVD_SOCKET": "/tmp/s", "KVD_ACCESS_UIDS": "1, 2", "HOME": "/"}
    )
    assert config.pool.size == Amount(size_bytes=2 * GIB)
    assert (config.pool.lock, config.clients.max, config.access.uids) == ("no", 3, (1, 2))
    rows = {key: (value, source) for key, value, source, _ in config.describe()}
    assert rows["pool.size"] == ("2 GiB", "KVD_POOL_SIZE")
    assert rows["pool.lock"] == ("no", str(path))
    assert rows["server.socket"] == ("/tmp/s", "KVD_SOCKET")
    assert rows["clients.hazards_max"] == ("1048576", "default")


def test_every_option_has_a_meaning():
    for key, value, source, meaning in Config().describe():
        assert meaning, key
        assert value != "" or key.endswith("listen")
        assert source == "default"


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        ("[pool]\nsiez = 1", {}, ["kvd.toml", "pool.siez", "did you mean 'size'"]),
        ("[pol]\nsize = 1", {}, ["kvd.toml", "[pol]", "did you mean 'pool'"]),
        ("pool = 3", {}, ["kvd.toml", "not a section"]),
        ("[pool]\nsize = ", {}, ["kvd.toml", "not TOML"]),
        ("", {"KVD_POOL_SIZ": "1"}, ["KVD_POOL_SIZ", "did you mean 'KVD_POOL_SIZE'"]),
        ("", {"KVD_PULL_SIZE": "1"}, ["KVD_PULL_SIZE", "did you mean 'KVD_POOL_SIZE'"]),
        ("", {"KVD_POOL_SIZE": "much"}, ["KVD_POOL_SIZE", "pool.size", "'much'", "64MiB", "80%"]),
        ("", {"KVD_POOL_SIZE": "120%"}, ["'120%'", "at most 100%"]),
        ("", {"KVD_POOL_SIZE": "-1"}, ["pool.size", "'-1'"]),
        ('[pool]\nhuge_pages = "yes"', {}, ["kvd.toml", "pool.huge_pages", "'yes'", "'thp'", "'never'"]),
        ('[clients]\nsq_size = "768KiB"', {}, ["clients.sq_size", "power of two"]),
        ('[clients]\nsq_size = "1KiB"', {}, ["clients.sq_size", "524288"]),
        ("[clients]\nmax = 0", {}, ["clients.max", "0", "1"]),
        ("[clients]\nmax = 100000", {}, ["clients.max", "1024"]),
        ("[pool]\nfamilies_max = true", {}, ["pool.families_max", "True", '"auto"']),
        ("[access]\nuids = [-1]", {}, ["access.uids"]),
        ("[eviction]\nprotected_share = 1.0", {}, ["eviction.protected_share", "1.0"]),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(tmp_path, text, env, said):
    with pytest.raises(ConfigError) as caught:
        Config.load(write(tmp_path, text), env)
    for part in said:
        assert part in caught.value.message


def test_all_problems_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Config.load(write(tmp_path, '[pool]\nlock = "x"\nsiz = 1\n[clients]\nmax = -1\n'), {})
    assert len(caught.value.message.splitlines()) == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        Config.load(tmp_path / "absent.toml", {})


def test_a_config_cannot_change():
    with pytest.raises(ValueError):
        Config().pool.lock = "no"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        ("64KiB", 65536),
        ("1.5GiB", 3 * GIB // 2),
        ("10GB", 10**10),
        (5, 5),
        ("2 m", 2 * limits.MIB),
    ],
)
def test_sizes(text, size):
    assert c.parse_size(text) == size


def sized(memory=16 * GIB, **pool):
    return c.resolve(Config(pool=c.PoolConfig(**pool)), memory, "this machine")


def test_shares_become_whole_frames_in_segments():
    sizes = sized(size="80%")
    assert sizes.pool_bytes % limits.frame_bytes == 0
    assert 16 * GIB * 0.8 - limits.frame_bytes < sizes.pool_bytes <= 16 * GIB * 0.8
    assert sum(sizes.segments_bytes) == sizes.pool_bytes
    assert all(size % limits.frame_bytes == 0 for size in sizes.segments_bytes)
    assert sizes.families_max == sizes.pool_bytes // 65536
    assert sizes.leased_bytes_max == sizes.pool_bytes // 2


def test_large_pools_stay_below_the_count_of_segments():
    assert len(sized(memory=4096 * GIB, size="99%").segments_bytes) <= 128
    assert sized(size="64MiB").segments_bytes == (64 * limits.MIB,)
    assert sized(size="10MiB", segment_size="4MiB").segments_bytes == (
        4 * limits.MIB,
        4 * limits.MIB,
        2 * limits.MIB,
    )


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        ({"size": "17GiB"}, ["pool.size", "18253611008", "this machine", "17179869184"]),
        ({"size": "100%"}, ["pool.size", "index", "17179869184", "make pool.size smaller"]),
        ({"size": "8GiB", "families_max": 1 << 28}, ["pool.families_max (268435456)", "index"]),
        ({"size": "1MiB"}, ["pool.size", "frame"]),
        ({"size": "8GiB", "segment_size": "3000001"}, ["pool.segment_size", "multiple"]),
        ({"size": "8GiB", "segment_size": "2MiB"}, ["pool.segment_size", "1024"]),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_the_numbers(pool, said):
    with pytest.raises(ConfigError) as caught:
        sized(**pool)
    for part in said:
        assert part in caught.value.message


@pytest.mark.parametrize(
    "sizes", [(64, 64, 1, 1), (1000, 2000, 3, 64), (65_537, 131_074, 128, 1024), (1 << 20, 1 << 21, 7, 5)]
)
def test_the_index_is_as_large_as_the_native_code_makes_it(sizes):
    """Fails if the layout changes and the configuration goes on checking the old one."""
    assert c.index_bytes(*sizes) == _native.Table.bytes_for(*sizes)


def test_a_size_that_is_cut_to_whole_frames_is_told():
    assert sized(size="4MiB").notes == []
    assert sized(size="33.3%").notes == [], "a share is about so much"
    (note,) = sized(size="3MiB").notes
    assert "pool.size is 2 MiB, 1048576 B less" in note


@pytest.mark.parametrize("key", ["KVD_SOCKET", "KVD_SERVER_SOCKET", "KVD_SERVER_RUNTIME_DIR"])
def test_paths_are_absolute(key):
    """Relative ones meant another place to the daemon, to its clients and to kvctl."""
    with pytest.raises(ConfigError, match="absolute path"):
        Config.load(None, {key: "run/kvd.sock"})
    assert Config.load(None, {key: "/run/kvd/x"})


def test_a_socket_path_counts_in_bytes():
    with pytest.raises(ConfigError, match="107 bytes"):
        Config.load(None, {"KVD_SOCKET": "/" + "ä" * 60})


def test_the_documentation_has_every_option_as_it_is():
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    for key, value, _, meaning in Config().describe():
        shown = f"`{value}`" if value else "–"
        assert f"| `{key.partition('.')[2]}` | {shown} | {meaning} |" in text, key
