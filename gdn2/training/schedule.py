"""The learning rate as a function of the tokens seen, so that no state of it can be lost."""

from math import cos, pi

from gdn2.training.config import ScheduleSection


def rate_at(tokens: int, schedule: ScheduleSection) -> float:
    """Part of the peak rate after `tokens`: linear to 1 over the warm-up, then a cosine to the final fraction."""
    if tokens < schedule.warmup_tokens:
        return tokens / schedule.warmup_tokens
    done = (tokens - schedule.warmup_tokens) / (schedule.tokens - schedule.warmup_tokens)
    floor = schedule.final_fraction
    return floor + (1 - floor) * (1 + cos(pi * min(done, 1.0))) / 2
