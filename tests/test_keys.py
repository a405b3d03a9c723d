"""Object names are written and parsed in one place."""

from tplr import keys


def test_names() -> None:
    assert keys.gradient_key(12, 3, "1") == "gradient-12-3-v1.safetensors"
    assert keys.commit_key(12, 3, "1") == "commit-12-3-v1"
    assert keys.debug_key(12, 3, "1") == "debug-12-3-v1.json"
    assert keys.scores_key(12, 3, "1") == "scores-12-3-v1.json"
    assert keys.scores_seal_key(12, 3, "1") == "scores-seal-12-3-v1.json"
    assert keys.evaluation_key(12, 3, "1") == "evaluation-12-3-v1.json"
    assert keys.vote_key(12, 3, "1") == "vote-12-3-v1.json"
    assert keys.echo_key(12, 4, 3, "1") == "echo-12-4-3-v1.json"
    assert keys.status_key(12, 4, 3, "1") == "status-12-4-3-v1.json"
    assert keys.decision_key(12, "1") == keys.included_key(12, "1") == "aggregator-12-v1.json"
    assert keys.start_window_key("1") == "start_window_v1.json"
    assert keys.peers_key(12, "1") == "peers_12_v1.json"


def test_peers_keys_of_other_versions_and_shapes_are_none() -> None:
    assert keys.parse_peers_key(keys.peers_key(12, "1"), "1") == 12
    for name in ("peers_12_v2.json", "peers_-1_v1.json", "peers__v1.json", "peers_12_v1.json.tmp", "peers_" + "9" * 99):
        assert keys.parse_peers_key(name, "1") is None


def test_state_keys() -> None:
    assert keys.state_key("gradient", 12, 3, "1") == keys.gradient_key(12, 3, "1")
    assert keys.state_key("checkpoint", 12, 3, "1") == "checkpoint-12-3-v1.safetensors"
    assert keys.state_key("aggregator", 12, 3, "1") == "aggregator-12-v1.safetensors"


def test_keys_of_windows_are_read_back() -> None:
    for make in (
        keys.gradient_key,
        keys.commit_key,
        keys.debug_key,
        keys.scores_key,
        keys.scores_seal_key,
        keys.evaluation_key,
    ):
        found = keys.parse_window_key(make(12, 3, "1"), "1")
        assert found is not None
        assert (found.window, found.uid) == (12, 3)
    assert keys.parse_window_key(keys.scores_seal_key(12, 3, "1"), "1") == ("scores-seal", 12, 3)
    assert keys.parse_window_key(keys.vote_key(12, 3, "1"), "1") == ("vote", 12, 3)
    assert keys.parse_window_key(keys.echo_key(12, 4, 3, "1"), "1") == ("echo", 12, 3)
    assert keys.parse_window_key(keys.status_key(12, 4, 3, "1"), "1") == ("status", 12, 3)
    assert keys.parse_window_key("checkpoint-12-3-v1/a/b.safetensors", "1") == ("checkpoint", 12, 3)
    assert keys.parse_window_key(keys.state_key("aggregator", 12, 3, "1"), "1") == ("aggregator", 12, None)
    for name in (
        keys.gradient_key(12, 3, "2"),
        keys.commit_key(12, 3, "12"),
        "gradient-12-v1.safetensors",
        "aggregator-12-3-v1.safetensors",
        "gradient--12-3-v1.safetensors",
        "gradient-12-3-v1.safetensors.tmp",
        "commit-12-3-v1-old",
        "gradient-" + "9" * 99 + "-3-v1.safetensors",
        "echo-12-3-v1.json",
        "vote-12-4-3-v1.json",
        # The start of the run: a late reader needs them.
        keys.vote_key(None, 3, "1"),
        keys.echo_key(None, 4, 3, "1"),
        keys.decision_key(None, "1"),
        keys.peers_key(12, "1"),
        keys.start_window_key("1"),
    ):
        assert keys.parse_window_key(name, "1") is None, name


def test_the_version_of_a_window_is_the_one_in_force() -> None:
    version = keys.RunVersion("1", [(50, "2")])
    for window, other in ((49, "2"), (50, "1")):
        for make in (keys.gradient_key, keys.commit_key, keys.debug_key, keys.scores_key, keys.scores_seal_key):
            assert keys.parse_window_key(make(window, 3, version), version) is not None
            assert keys.parse_window_key(make(window, 3, other), version) is None
        assert keys.parse_peers_key(keys.peers_key(window, version), version) == window
        assert keys.parse_peers_key(keys.peers_key(window, other), version) is None
    assert keys.included_key(50, version) == "aggregator-50-v2.json"
    assert keys.state_key("aggregator", 50, 0, version) == "aggregator-50-v2.safetensors"
    assert keys.checkpoint_prefix(50, 3, version) == "checkpoint-50-3-v2/"
    assert keys.software_key(3) == "software-3.json"


def test_keys_of_every_run_are_read_back_and_no_others() -> None:
    of_a_uid = (
        *(make(12, 3, "1") for make in (keys.gradient_key, keys.commit_key, keys.debug_key, keys.scores_key)),
        *(make(12, 3, "1") for make in (keys.scores_seal_key, keys.evaluation_key, keys.vote_key)),
        *(make(12, 4, 3, "1") for make in (keys.echo_key, keys.status_key)),
        *(keys.state_key(kind, 12, 3, "1") for kind in ("gradient", "checkpoint", "debug")),
        *(keys.checkpoint_prefix(12, 3, "1") + name for name in ("manifest.json", "shard-00000-00012.safetensors")),
    )
    starts = (keys.vote_key(None, 3, "1"), keys.echo_key(None, 4, 3, "1"), keys.status_key(None, 4, 3, "1"))
    shared = (keys.included_key(12, "1"), keys.state_key("aggregator", 12, 3, "1"), keys.peers_key(12, "1"))
    whole = (keys.start_window_key("1"), keys.decision_key(None, "1"), keys.page_key("1"), keys.page_document_key("1"))
    tests = (keys.probe_key(), f"{keys.probe_key()}-by-read-key")
    for names, expected in (
        (of_a_uid, (1, 3, 12)),
        (starts, (1, 3, None)),
        (shared, (1, None, 12)),
        (tests, (None, None, None)),
    ):
        assert {name: keys.parse_run_key(name) for name in names} == dict.fromkeys(names, expected)
    assert {keys.parse_run_key(name) for name in whole} == {(1, None, None)}
    for name in (*of_a_uid, *starts, *shared, *whole, *tests):
        assert name.startswith(keys.RUN_PREFIXES)
        unversioned = name.replace("-v1", "-vmine").replace("_v1", "_v")
        for other in {f"my/{name}", f"{name}.bak", f"{name}/mine", unversioned} - {name}:
            assert keys.parse_run_key(other) is None
    for name in (
        "gradient-descent.pdf",
        "checkpoint-12-3-v1/weights.bin",
        "commit-12-3",
        "peers_v1.json",
        "page_v1.css",
        "probe-of-latency",
    ):
        assert keys.parse_run_key(name) is None
