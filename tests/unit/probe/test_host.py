"""What the host offers, read from a file tree of another machine."""

import mmap
import os

import pytest

from kvd.probe import cgroup, hugepages, memory, numa

GIB = 1 << 30


@pytest.fixture
def host(tmp_path):
    """host({path: text}) -> root of a file tree."""

    def make(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


MEMINFO = {"proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"}


def test_no_limit(host):
    root = host({**MEMINFO, "proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/memory.max": "max\n"})
    facts = memory.memory(root)
    assert (facts.total_bytes, facts.available_bytes) == (16 * GIB, 8 * GIB)
    assert (facts.bound_bytes, facts.bound_source) == (16 * GIB, "this machine")


def test_version_2_the_least_of_all_ancestors_counts(host):
    """A limit above the own group kills just the same."""
    root = host(
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/slice/service\n",
            "sys/fs/cgroup/slice/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/slice/memory.current": "5\n",
            "sys/fs/cgroup/slice/service/memory.max": f"{4 * GIB}\n",
        }
    )
    limit = cgroup.memory_limit(root)
    assert (limit.limit_bytes, limit.usage_bytes) == (2 * GIB, 5)
    facts = memory.memory(root)
    assert facts.bound_bytes == 2 * GIB
    assert "slice/memory.max" in facts.bound_source


def test_version_2_in_a_container_whose_hierarchy_begins_at_itself(host):
    root = host({**MEMINFO, "proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"})
    assert memory.memory(root).bound_bytes == GIB


def test_version_1(host):
    root = host(
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu:/\n4:hugetlb,memory:/a/b\n0::/\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
    )
    assert memory.memory(root).bound_bytes == 3 * GIB


def test_a_limit_above_the_machine_is_none(host):
    root = host({**MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * GIB}\n"})
    assert memory.memory(root).bound_source == "this machine"


def test_nothing_to_read_is_no_error(tmp_path):
    assert cgroup.memory_limit(tmp_path) is None
    assert memory.memory(tmp_path).total_bytes > 0
    assert numa.nodes(tmp_path) == ()
    assert hugepages.facts(tmp_path) == hugepages.HugePageFacts(None, 0, 0, 0)
    assert hugepages.mapped(tmp_path) == {}


def test_huge_page_settings(host):
    mm = "sys/kernel/mm/"
    root = host(
        {
            mm + "transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
            mm + "hugepages/hugepages-2048kB/nr_hugepages": "12\n",
            mm + "hugepages/hugepages-2048kB/free_hugepages": "7\n",
        }
    )
    facts = hugepages.facts(root)
    assert (facts.shmem_enabled, facts.thp_possible) == ("advise", True)
    assert (facts.hugetlb_total_count, facts.hugetlb_free_count) == (12, 7)


SMAPS = """7f0000000000-7f0040000000 rw-s 00000000 00:01 77   /memfd:kvd-pool-0 (deleted)
Size:            1048576 kB
KernelPageSize:        4 kB
Rss:              524288 kB
ShmemPmdMapped:   409600 kB
Locked:           524288 kB
VmFlags: rd wr sh mr mw me ms
7f0100000000-7f0140000000 rw-s 00000000 00:01 77   /memfd:kvd-pool-0 (deleted)
Rss:                   8 kB
7f0200000000-7f0240000000 rw-s 00000000 00:0f 78   /anon_hugepage (deleted)
KernelPageSize:     2048 kB
Rss:                   0 kB
Shared_Hugetlb:     4096 kB
7f0300000000-7f0340000000 rw-p 00000000 00:00 0
Rss:                  16 kB
"""


def test_what_mappings_really_hold(host):
    found = hugepages.mapped(host({"proc/self/smaps": SMAPS}))
    assert found == {
        ("00:01", 77): hugepages.MappingPages(512 << 20, 400 << 20, 4096, 512 << 20),
        ("00:0f", 78): hugepages.MappingPages(4 << 20, 0, 2 << 20, 0),
    }


def test_ones_own_mapping_is_found():
    fd = os.memfd_create("kvd-test")
    os.ftruncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20) as mapping:
        mapping[: 1 << 16] = b"x" * (1 << 16)
        assert hugepages.mapped()[hugepages.file_key(fd)].resident_bytes >= 1 << 16
    os.close(fd)


def test_nodes(host):
    node = "sys/devices/system/node/node"
    root = host(
        {
            node + "0/meminfo": "Node 0 MemTotal:       1024 kB\n",
            node + "0/cpulist": "0-2,8\n",
            node + "1/meminfo": "Node 1 MemTotal:       2048 kB\n",
            node + "1/cpulist": "\n",
            node + "2/meminfo": "Node 2 MemTotal:       0 kB\n",
        }
    )
    assert numa.nodes(root) == (numa.Node(0, 1 << 20, (0, 1, 2, 8)), numa.Node(1, 2 << 20, ()))


def test_lock_limit(host):
    limit = memory.lock_limit(host({"proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n"}))
    assert limit.privileged
    assert not memory.lock_limit(host({"proc/self/status": "CapEff:\t0000000000000001\n"})).privileged


def test_file_systems():
    assert memory.file_system_free_bytes("/") > 0
    assert memory.file_system_free_bytes("/nonexistent/x") is None
