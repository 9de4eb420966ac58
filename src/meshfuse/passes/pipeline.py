"""The passes before segmentation, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from meshfuse.base.options import NO_OPTIONS, Options
from meshfuse.base.trace import Note
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from meshfuse.passes.concretize import concretize
from meshfuse.passes.decompose_resharding import decompose_resharding
from meshfuse.passes.finalize_multidevice import finalize_multidevice
from meshfuse.passes.fold_casts import fold_casts, remove_unread
from meshfuse.passes.forget_loops import forget_loops
from meshfuse.passes.forget_single import forget_single
from meshfuse.passes.join_reductions import join_reductions
from meshfuse.passes.mark_aliases import mark_aliases
from meshfuse.passes.order_sharded_axes import order_sharded_axes
from meshfuse.passes.overlap import bind_overlap
from meshfuse.passes.place_updates import place_updates
from meshfuse.passes.propagate_sharding import propagate_sharding
from meshfuse.passes.propagate_streams import propagate_streams
from meshfuse.passes.team_order import add_floats_in_team_order, add_half_floats_in_team_order

Pass = Callable[[Program], tuple[Program, tuple[Note, ...]]]
"""A rewrite of a whole Program, and its notes. Raises UserError or Unsupported."""

BEFORE_LOOPS: tuple[Pass, ...] = (
    join_reductions,
    forget_loops,
    concretize,
    forget_single,
    fold_casts,
    remove_unread,
    propagate_sharding,
    place_updates,
    decompose_resharding,
    mark_aliases,
    order_sharded_axes,
)
"""All is where it is to be, and what moves is said."""

LOOPS: tuple[Pass, ...] = (propagate_streams, finalize_multidevice)

PRESEGMENTATION: tuple[Pass, ...] = (*BEFORE_LOOPS, *LOOPS)


BEFORE_USER_SCHEDULE: tuple[Pass, ...] = (concretize, fold_casts)
"""What a program goes through that a user then schedules as one kernel: no tensor vanishes."""


def passes_for(form: Overlap, options: Options = NO_OPTIONS) -> tuple[Pass, ...]:
    """The passes that bring a program into a form of overlap. Options say in which order ranks'
    terms are added."""
    binding: tuple[Pass, ...] = () if form == PLAIN else (partial(bind_overlap, form=form),)
    first, *rest = LOOPS
    return (*BEFORE_LOOPS, *binding, first, *_adding(options), *rest)


def _adding(options: Options) -> tuple[Pass, ...]:
    if options.is_enabled("deterministic_collectives"):
        return (add_floats_in_team_order,)
    if options.is_enabled("float32_collectives"):
        return (add_half_floats_in_team_order,)
    return ()


def overlap_notes(
    program: Program, forms: Sequence[Overlap]
) -> Iterator[tuple[Overlap, tuple[Note, ...]]]:
    """What each form binds, and what it cannot: the passes before are run once for all."""
    prepared, _ = run_passes(program, BEFORE_LOOPS)
    for form in forms:
        yield form, bind_overlap(prepared, form)[1]


def run_passes(
    program: Program, passes: Sequence[Pass] = PRESEGMENTATION
) -> tuple[Program, tuple[Note, ...]]:
    """Apply the passes in order and verify after each. Notes stand in the order they were made."""
    notes: list[Note] = []
    verified = None
    for apply in passes:
        program, said = apply(program)
        verify(program, verified)
        verified = program
        notes.extend(said)
    return program, tuple(notes)
