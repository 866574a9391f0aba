"""Lists of hosts in few words; files of them are held by tests/launch/on_cluster/test_script.py."""

import pytest

from tools.host.names import shorten


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["node3", "node5", "node4", "master"], "master,node[3-5]"),
        (["node7"], "node7"),
        (["n008", "n010", "n009", "n12"], "n12,n[008-010]"),
        (["node098", "node099", "node100"], "node[098-100]"),
        (["node9", "node10"], "node[9-10]"),
        (["gpu1.example.org", "gpu3.example.org"], "gpu[1,3].example.org"),
        (["10.0.0.1", "10.0.0.2", "10.0.1.2"], "10.0.0.[1-2],10.0.1.2"),
        ([], ""),
    ],
)
def test_many_hosts_in_few_words(hosts, words):
    assert shorten(hosts) == words
