"""The learning rate over the tokens."""

from math import cos, pi

import pytest

from gdn2.training.config import ScheduleSection
from gdn2.training.schedule import rate_at

PAPER = ScheduleSection(tokens=100_000_000_000, warmup_tokens=1_000_000_000)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        (0, 0.0),
        (524_288, 0.000524288),
        (500_000_000, 0.5),
        (1_000_000_000, 1.0),
        (50_500_000_000, 0.55),  # half-way down, between 1 and 0.1
        (25_750_000_000, 0.1 + 0.45 * (1 + cos(pi / 4))),
        (100_000_000_000, 0.1),
        (100_000_400_000, 0.1),  # the last step may pass the end
    ],
)
def test_rate_of_the_paper(tokens: int, rate: float) -> None:
    assert rate_at(tokens, PAPER) == pytest.approx(rate, rel=1e-12, abs=1e-15)


def test_without_a_warm_up_the_peak_comes_first() -> None:
    schedule = ScheduleSection(tokens=10, final_fraction=0.0)
    assert rate_at(0, schedule) == 1
    assert rate_at(10, schedule) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": 0}, "tokens: got 0, expected at least 1"),
        ({"tokens": 5, "warmup_tokens": 5}, "warmup_tokens: got 5, expected at least 0 and less"),
        ({"tokens": 5, "final_fraction": 1.5}, "final_fraction: got 1.5, expected 0 to 1"),
    ],
)
def test_bad_schedules(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleSection(**values)  # type: ignore[arg-type]
