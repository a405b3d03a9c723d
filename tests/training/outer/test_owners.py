"""Tensors are divided among ranks by size, equally on every rank."""

from tplr.training.outer.owners import assign_owners


def test_the_largest_go_first_and_to_the_rank_with_the_least():
    sizes = {"a": 3, "b": 9, "c": 5, "d": 5, "e": 1}
    assert assign_owners(sizes, 1) == dict.fromkeys(sizes, 0)
    # b: 9 to rank 0; c and d: 10 to rank 1; a: 12 to rank 0; e: 11 to rank 1.
    assert assign_owners(sizes, 2) == {"b": 0, "c": 1, "d": 1, "a": 0, "e": 1}
    assert assign_owners(dict(reversed(sizes.items())), 2) == assign_owners(sizes, 2)


def test_no_rank_has_more_than_its_share_and_the_largest():
    sizes = {f"layer.{i}": 7 + i % 5 for i in range(40)} | {"embed": 100}
    for ranks in (2, 3, 4, 8):
        owners = assign_owners(sizes, ranks)
        loads = [sum(sizes[name] for name in sizes if owners[name] == rank) for rank in range(ranks)]
        assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values())
    assert set(assign_owners({"a": 1, "b": 1}, 4).values()) == {0, 1}
