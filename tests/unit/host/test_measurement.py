"""Items of spans, by hand; and what a trace notes of a communication."""

from __future__ import annotations

from meshfuse.base.trace import Activity, Extent, Meeting, Span, Trace, Work
from meshfuse.host.measurement import measured_items
from meshfuse.host.timeline import Kind, Label, Lane


def span(name: str, start: int, end: int, meeting: Meeting | None = None) -> Span:
    extent = Extent("cpu", 10, 20)
    return Span(Activity.run, Work(name, "", 0), start, end, extent, meeting)


def test_one_communication_behind_work() -> None:
    """Posted in 1 ns, done 3 ns later, awaited at 9 ns, and put in its place in 2."""
    labels = {"sum": Label("sum", Kind.communication, "T3"), "mm": Label("mm", Kind.gemm, "T4")}
    compiled = Span(Activity.compile, Work("program", "", 0), 0, 99, Extent())
    found = [compiled, span("mm", 102, 108), span("sum", 100, 111, Meeting(0, 101, 109, 104))]
    items = measured_items(found, labels)
    assert [(i.label.name, i.lane, round(i.start * 1e9), round(i.end * 1e9)) for i in items] == [
        ("sum", Lane.communication, 0, 4),
        ("post sum", Lane.compute, 0, 1),
        ("mm", Lane.compute, 2, 8),
        ("wait for sum", Lane.compute, 9, 11),
    ]
    assert [item.label.kind for item in items] == [
        Kind.communication,
        Kind.post,
        Kind.gemm,
        Kind.wait,
    ]
    assert {item.label.cause for item in items} == {"T3", "T4"}
    assert [item.bytes for item in items] == [20, 0, 30, 0]


def test_communications_follow_one_another_on_their_lane() -> None:
    """The second came before the first was over; of the third nobody heard before its wait."""
    found = [
        span("a", 0, 20, Meeting(0, 1, 15, 10)),
        span("b", 2, 21, Meeting(1, 3, 20, 6)),
        span("c", 4, 30, Meeting(2, 5, 22, None)),
    ]
    items = measured_items(found, {})
    lane = [i for i in items if i.lane is Lane.communication]
    assert [(i.label.name, round(i.start * 1e9), round(i.end * 1e9)) for i in lane] == [
        ("a", 0, 10),
        ("b", 10, 10),
        ("c", 10, 30),
    ]


def test_items_are_on_the_stream_that_they_ran_on() -> None:
    """Marked when they begin, and a communication when it is posted, whoever waits."""
    ticks = iter(range(10))
    trace = Trace(clock=lambda: next(ticks))
    trace.stream = 1
    trace.open(0, Work("sum", "communication", 0), Extent())
    trace.posted(0)
    trace.stream = 0
    with trace.span(Activity.run, Work("mm", "expr_eval", 1)):
        trace.stream = None
    trace.awaits(0)
    trace.close(0)
    items = measured_items(trace.spans, {})
    assert [(item.label.name, item.stream) for item in items] == [
        ("sum", 1),
        ("post sum", 1),
        ("mm", 0),
        ("wait for sum", 1),
    ]


def test_nothing_ran() -> None:
    assert measured_items([], {}) == ()


def test_a_trace_notes_when_things_happen() -> None:
    ticks = iter(range(10))
    trace = Trace(clock=lambda: next(ticks))
    work = Work("all_gather T1", "communication", 0)
    trace.open(7, work, Extent())
    trace.posted(7)
    trace.arrived(7)
    trace.awaits(7)
    trace.arrived(7)  # too late to count
    trace.close(7)
    trace.arrived(7)  # later still
    [found] = trace.spans
    assert (found.start, found.end) == (0, 4)
    assert found.meeting == Meeting(7, posted=1, awaited=3, arrived=2)
