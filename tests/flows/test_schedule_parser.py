"""Schedules are read by the documented rule and printed in the same form."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flowmill.configs.errors import ConfigError
from flowmill.flows.schedule_parser import next_start, read_schedule, schedule_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0 2 * * *", "0 2 * * * Europe/Vienna"),
        (" 0  2 * * MON ", "0 2 * * MON Europe/Vienna"),
        ("every 30 s", "every 30 s"),
        ("every 90min", "every 90 min"),
        ("every 6 h", "every 6 h"),
        ("every 48 h", "every 2 d"),
        ("FREQ=WEEKLY;BYDAY=SU", "FREQ=WEEKLY;BYDAY=SU Europe/Vienna"),
    ],
)
def test_a_schedule_is_told_as_it_was_written_and_comes(text: str, shown: str) -> None:
    rule = read_schedule(text, "Europe/Vienna")
    assert schedule_text(rule) == shown
    due = next_start(rule)
    assert due is not None
    now = datetime.now(UTC)
    assert now - timedelta(seconds=5) < due < now + timedelta(days=8)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 fields"),
        ("@daily", "1 fields"),
        ("0 0 2 * * *", "6 fields"),
        ("every 0 s", "1 s at least"),
        ("every 99999999999999 d", "366 d at most"),
        ("every 30 minutes", "3 fields"),
        ("99 2 * * *", "Invalid cron"),
        ("H * * * *", "Invalid cron"),
        ("0 0 30 2 *", "failed to find next date"),
        ("FREQ=MINUTELY;INTERVAL=0", "INTERVAL is 0"),
        ("FREQ=SOMETIMES", "Invalid RRule"),
        ("DTSTART:20200101T000000\nRRULE:FREQ=DAILY;COUNT=2", "it never comes"),
    ],
)
def test_what_is_no_schedule_or_never_comes_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        read_schedule(text, "UTC")
    assert why in str(refused.value)


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../etc", "Europe", "/etc/passwd"])
def test_a_time_zone_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--timezone"):
        read_schedule("every 1 h", name)


def test_the_next_start_is_that_of_the_first() -> None:
    often, seldom = read_schedule("every 1 h", "UTC"), read_schedule("0 0 1 1 *", "UTC")
    due = next_start(seldom, often)
    assert due is not None
    assert due < datetime.now(UTC) + timedelta(hours=1, seconds=5)
    assert next_start() is None
