"""Object names are written and parsed in one place."""

from tplr import keys


def test_names() -> None:
    assert keys.gradient_key(12, 3, "1") == "gradient-12-3-v1.safetensors"
    assert keys.commit_key(12, 3, "1") == "commit-12-3-v1"
    assert keys.debug_key(12, 3, "1") == "debug-12-3-v1.json"
    assert keys.start_window_key("1") == "start_window_v1.json"
    assert keys.peers_key(12, "1") == "peers_12_v1.json"


def test_peers_keys_of_other_versions_and_shapes_are_none() -> None:
    assert keys.parse_peers_key(keys.peers_key(12, "1"), "1") == 12
    for name in ("peers_12_v2.json", "peers_-1_v1.json", "peers__v1.json", "peers_12_v1.json.tmp", "peers_" + "9" * 99):
        assert keys.parse_peers_key(name, "1") is None
