"""The order in which the shards of a store are read."""

from tplr.stores.detect import natural


def test_numbers_in_names_are_compared_by_value() -> None:
    assert sorted(["shard_10000", "shard_9999", "data/2", "data/10"], key=natural) == [
        "data/2",
        "data/10",
        "shard_9999",
        "shard_10000",
    ]


def test_a_superscript_is_no_number() -> None:
    """``"²".isdigit()`` is true, and ``int("²")`` raises."""
    assert sorted(["m²", "m²2", "m1²", "²"], key=natural) == ["m1²", "m²", "m²2", "²"]
