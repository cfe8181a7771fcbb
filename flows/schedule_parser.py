"""Parses and formats the schedules of deployments, and computes their next start."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, NoSchedule, RRuleSchedule
from pydantic import TypeAdapter, ValidationError

from flowmill.configs.errors import ConfigError

#: A rule of when to start.
Rule = CronSchedule | IntervalSchedule | RRuleSchedule
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_EVERY = re.compile(r"every (\d+) ?(s|min|h|d)")
_LONGEST = timedelta(days=366)
_RRULES = ("FREQ=", "RRULE:", "DTSTART")
_CRON_FIELDS = 5
_PATIENCE_S = 10


def read_schedule(text: str, timezone: str) -> Rule:
    """Return a schedule: five cron fields, 'every 30 s' (s, min, h, d), or an RRULE."""
    _check_timezone(timezone)
    rule = text.strip()
    every = _EVERY.fullmatch(rule)
    try:
        if every:
            return _interval(int(every[1]) * _UNITS[every[2]], timezone)
        schedule = _rrule(rule, timezone) if rule.startswith(_RRULES) else _cron(rule, timezone)
        due = _soon(schedule)
    except ValidationError as error:
        raise _unreadable(text, error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    except (ValueError, KeyError, OverflowError, TypeError) as error:
        raise _unreadable(text, " ".join(str(error).split())) from None
    if due is None:
        raise _unreadable(text, "it never comes")
    return schedule


def schedule_text(rule: Rule | NoSchedule) -> str:
    """Return a schedule in the format that ``read_schedule`` takes, with its time zone where that matters."""
    if isinstance(rule, NoSchedule):
        return "never"
    if isinstance(rule, IntervalSchedule):
        seconds = rule.interval.total_seconds()
        unit = next((name for name in reversed(_UNITS) if seconds % _UNITS[name] == 0), "s")
        return f"every {seconds / _UNITS[unit]:g} {unit}"
    return f"{rule.cron if isinstance(rule, CronSchedule) else rule.rrule} {rule.timezone or 'UTC'}"


def next_start(*rules: Rule | NoSchedule) -> datetime | None:
    """Return the earliest next start of some schedules, in the schedule's time zone; None if there is none."""
    starts = [(due, rule.timezone) for rule in rules if not isinstance(rule, NoSchedule) for due in _dates(rule)]
    if not starts:
        return None
    due, timezone = min(starts, key=lambda each: each[0])
    return due.astimezone(ZoneInfo(timezone or "UTC"))


def _dates(rule: Rule) -> Iterable[datetime]:
    from prefect.server.schemas import schedules as served

    same: Any = TypeAdapter(served.SCHEDULE_TYPES).validate_python(rule.model_dump())
    return asyncio.run(same.get_dates(n=1, start=datetime.now(UTC)))


def _check_timezone(name: str) -> None:
    try:
        ZoneInfo(name)
    # A folder of zones, a name with a NUL, or a path outside the zone database.
    except (KeyError, ValueError, OSError):
        raise ConfigError(
            f"--timezone '{name}' cannot be read: it is no name of a time zone. Name one as in Europe/Vienna, or UTC."
        ) from None


def _interval(seconds: int, timezone: str) -> IntervalSchedule:
    """Return an interval schedule; refuse one below 1 s or above the maximum."""
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise ValueError(f"an interval is 1 s at least and {_LONGEST.days} d at most")
    # Anchored now: on every server the first tick is one interval away.
    return IntervalSchedule(interval=timedelta(seconds=seconds), anchor_date=datetime.now(UTC), timezone=timezone)


def _cron(text: str, timezone: str) -> CronSchedule:
    """Return a cron schedule of five fields; @daily and a sixth field are refused: their meaning varies."""
    fields = text.split()
    if len(fields) != _CRON_FIELDS:
        raise ValueError(f"{len(fields)} fields instead of {_CRON_FIELDS}")
    return CronSchedule(cron=" ".join(fields), timezone=timezone)


def _rrule(text: str, timezone: str) -> RRuleSchedule:
    """Return an RRULE schedule; refuse an INTERVAL of 0, whose iteration would not end."""
    if re.search(r"INTERVAL=0*(;|\s|$)", text):
        raise ValueError("its INTERVAL is 0")
    return RRuleSchedule(rrule=text, timezone=timezone)


def _soon(rule: Rule) -> datetime | None:
    """Return the next start of a schedule; raise ValueError if the search takes too long, as on the server."""
    due: Future[datetime | None] = Future()

    def look() -> None:
        try:
            due.set_result(next_start(rule))
        except BaseException as error:  # noqa: BLE001 - the caller receives it
            due.set_exception(error)

    # A daemon thread: the process may end during the search.
    threading.Thread(target=look, daemon=True).start()
    try:
        return due.result(_PATIENCE_S)
    except TimeoutError:
        raise ValueError(f"no date of it is found within {_PATIENCE_S} s") from None


def _unreadable(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"--schedule '{text}' cannot be read ({why}). Write five cron fields ('0 2 * * *'), 'every 30 s' (s, "
        "min, h, d) or an RRULE ('FREQ=WEEKLY;BYDAY=SU')."
    )
