"""Evidence is refused unless every product belongs to a miner."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from tplr.schemas import PRODUCT_LIMIT, Alignment, Evaluation, Evidence, LossChange, PeerObservation, published

GOOD: dict[str, Any] = {"uids": (1, 4), "products": (0.5, 0.1), "norms": (3.0, 4.0), "gram": (1.0, 0.2, 1.0)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"uids": (4, 1)}, "expected ascending ones"),
        ({"uids": (4, 4)}, "expected ascending ones"),
        ({"products": (0.5,)}, "expected 2 products and norms, and 3 entries of gram"),
        ({"norms": (3.0, 4.0, 5.0)}, "expected 2 products and norms"),
        ({"gram": (1.0, 0.2, 0.2, 1.0)}, "3 entries of gram"),
        ({"products": (2 * PRODUCT_LIMIT, 0.1)}, "less than or equal to"),
        ({"largest_norm": 0.0}, "greater than 0"),
        ({"loss": float("nan")}, "finite number"),
    ],
)
def test_an_alignment_has_one_product_for_each_uid_and_one_for_each_pair(
    changes: dict[str, Any], expected: str
) -> None:
    Alignment.model_validate(GOOD)
    with pytest.raises(ValidationError, match=expected):
        Alignment.model_validate(GOOD | changes)


@pytest.mark.parametrize("alignment", [Alignment.model_validate(GOOD), None])
def test_an_own_pages_test_has_a_product_for_each_measured_update(alignment: Alignment | None) -> None:
    def evidence(products: tuple[float, ...]) -> Evidence:
        tested = PeerObservation(hotkey="a", assigned_products=products)
        return Evidence(window=7, observations={"4": tested}, alignment=alignment)

    assert evidence(()).observations["4"].assigned_products == ()  # was not tested
    if alignment:
        assert evidence((0.3, 0.2)).observations["4"].assigned_products == (0.3, 0.2)
    with pytest.raises(ValidationError, match=f"assigned_products: expected {2 if alignment else 0}, one for each"):
        evidence((0.3,))


def test_published_products_are_rounded_and_within_the_limit() -> None:
    assert published([0.12345678, -1e12, 1e12]) == (0.123457, -PRODUCT_LIMIT, PRODUCT_LIMIT)
    gram = published([1e30, -1e30, 2.0])
    assert Alignment.model_validate(GOOD | {"gram": gram}).gram == gram


def test_what_is_not_a_number_is_not_published_as_a_gain() -> None:
    assert published([math.nan, math.inf, -math.inf]) == (-PRODUCT_LIMIT, PRODUCT_LIMIT, -PRODUCT_LIMIT)


def test_an_update_without_a_finite_loss_is_measured() -> None:
    change = LossChange(before=5.0, after=None, error=0.0, sequences=8)
    assert Evaluation(assigned=None, held_out=change).held_out.after is None
    with pytest.raises(ValidationError, match="finite number"):
        LossChange(before=5.0, after=float("inf"), error=0.0, sequences=8)
