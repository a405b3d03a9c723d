"""Sources by measured speed: unknown ones are tried, slow and failing ones come last, but not for ever."""

from tplr.exchange.source_speeds import EXPLORE, TOO_SLOW, SourceSpeeds

SLOW, FAST, OTHER = "slow", "fast", "other"


def names(speeds: SourceSpeeds) -> list[str]:
    return speeds.order([SLOW, FAST, OTHER])


def test_unknown_sources_keep_their_order_and_come_first() -> None:
    speeds = SourceSpeeds()
    assert names(speeds) == ["slow", "fast", "other"]
    speeds.note(SLOW, size=100, seconds=10.0)
    assert names(speeds) == ["fast", "other", "slow"]


def test_the_fastest_comes_first_and_one_that_failed_last() -> None:
    speeds = SourceSpeeds()
    for store, seconds in ((SLOW, 10.0), (FAST, 1.0), (OTHER, 5.0)):
        speeds.note(store, size=100, seconds=seconds)
    assert names(speeds) == ["fast", "other", "slow"]
    speeds.note(FAST, size=0, seconds=1.0)
    assert names(speeds) == ["other", "slow", "fast"]


def test_who_never_has_an_object_is_not_asked_first_for_ever() -> None:
    speeds = SourceSpeeds()
    speeds.note_absent(SLOW)
    speeds.note(FAST, size=100, seconds=1.0)
    assert names(speeds) == ["other", "fast", "slow"]
    speeds.note(OTHER, size=90, seconds=1.0)
    speeds.note_absent(FAST)  # it lacked one: half as fast
    assert names(speeds) == ["other", "fast", "slow"]


def test_a_measurement_does_not_replace_all_earlier_ones() -> None:
    speeds = SourceSpeeds()
    speeds.note(FAST, size=1000, seconds=1.0)
    speeds.note(FAST, size=100, seconds=1.0)  # 550 on average
    speeds.note(OTHER, size=300, seconds=1.0)
    speeds.note(SLOW, size=10, seconds=1.0)
    assert names(speeds) == ["fast", "other", "slow"]


def test_now_and_then_the_oldest_measurement_is_repeated() -> None:
    speeds = SourceSpeeds()
    for store, size in ((SLOW, 10), (OTHER, 50), (FAST, 100)):
        speeds.order([SLOW, FAST, OTHER])
        speeds.note(store, size=size, seconds=1.0)
    firsts = []
    for _ in range(2 * EXPLORE):
        first = speeds.order([SLOW, FAST, OTHER])[0]
        speeds.note(first, size={"slow": 10, "other": 50, "fast": 100}[first], seconds=1.0)
        firsts.append(first)
    assert firsts.count("fast") == 2 * EXPLORE - 2
    assert {"slow", "other"} <= set(firsts)


def test_the_fastest_of_the_others_says_what_is_too_slow() -> None:
    speeds = SourceSpeeds()
    assert speeds.expected([SLOW, FAST]) == 0.0
    speeds.note(FAST, size=100, seconds=1.0)
    speeds.note(OTHER, size=50, seconds=1.0)
    assert speeds.expected([SLOW, FAST, OTHER]) == 100 / TOO_SLOW
    assert speeds.expected([SLOW, OTHER]) == 50 / TOO_SLOW
    assert speeds.expected([]) == 0.0
