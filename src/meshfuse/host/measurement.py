"""When one rank did what, from the spans of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshfuse.base.trace import Activity, Meeting, Span
from meshfuse.host.timeline import Item, Kind, Label, Lane, wait_for

_NANO = 1e-9


def measured_items(spans: Sequence[Span], labels: Mapping[str, Label]) -> tuple[Item, ...]:
    """The items of the spans of runs, in nanoseconds, in the order in which they began.

    A communication is under way from its post until the transport is done, or else until its wait
    is over. The lane does one thing at a time: one that is posted while another is under way
    follows on that, and takes no time if it has overtaken it. Its post, and its wait with what that
    has to put in place, are on the compute lane, which they hold up.
    """
    runs = sorted((s for s in spans if s.activity is Activity.run), key=lambda span: span.start)
    begin = runs[0].start if runs else 0
    items: list[Item] = []
    busy_until = begin
    for span in runs:
        label = labels.get(span.work.name) or _label(span)
        amount = span.extent.input_bytes + span.extent.output_bytes
        if span.meeting is None:
            items.append(_item(label, Lane.compute, begin, span, span.start, span.end, amount))
            continue
        end = _arrival(span, span.meeting)
        start = max(span.start, busy_until)
        busy_until = end = max(start, end)
        received = span.extent.output_bytes
        items.append(_item(label, Lane.communication, begin, span, start, end, received))
        items += _held_up(label, begin, span, span.meeting)
    return tuple(sorted(items, key=lambda item: item.start))


def _held_up(label: Label, begin: int, span: Span, meeting: Meeting) -> tuple[Item, Item]:
    post = Label(f"post {label.name}", Kind.post, label.cause)
    return (
        _item(post, Lane.compute, begin, span, span.start, meeting.posted),
        _item(wait_for(label), Lane.compute, begin, span, meeting.awaited, span.end),
    )


def _arrival(span: Span, meeting: Meeting) -> int:
    """No later than the end of the wait: streams tell the time apart from one another."""
    return span.end if meeting.arrived is None else min(meeting.arrived, span.end)


def _item(
    label: Label, lane: Lane, begin: int, span: Span, start: int, end: int, amount: int = 0
) -> Item:
    """From `start` to `end`, of what the span is about."""
    seconds = (end - start) * _NANO
    return Item(label, lane, (start - begin) * _NANO, seconds, amount, stream=span.stream)


def _label(span: Span) -> Label:
    """Of what the host program does not name."""
    kind = Kind.operation if span.meeting is None else Kind.communication
    return Label(span.work.name, kind, "")
