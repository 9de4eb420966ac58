"""Updates in place lie as the inputs that they are written into."""

from __future__ import annotations

from dataclasses import replace

from meshfuse.base.trace import Note
from meshfuse.facts.layout import local_bytes
from meshfuse.facts.sharding import describe, sharding_of
from meshfuse.ir.ops import Set
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import append
from meshfuse.passes.apply_sharding import new_sharded_tensor

STAGE = "place_updates"


def place_updates(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Copy what updates an input to where that lies, if its user has placed it otherwise.

    output(T1, alias=T0), T0 split over mesh_x, T1 replicated  ->  T2 = set(T1), T2 split;
    output(T2, alias=T0)

    Decomposition makes a redistribution of the copy.
    """
    notes: list[Note] = []
    outputs = list(program.fusion.outputs)
    for place, output in enumerate(outputs):
        if output.alias is None:
            continue
        have, want = sharding_of(program, output.tensor), sharding_of(program, output.alias)
        if have == want or have.mesh is None or want.mesh is None:
            continue
        program, copy = new_sharded_tensor(program, output.tensor, want)
        program = append(program, Set(copy, output.tensor))
        outputs[place] = replace(output, tensor=copy)
        reason = f"{output.tensor} is {describe(have)}, {output.alias} is {describe(want)}"
        size = str(local_bytes(program, copy))
        notes.append(
            Note(STAGE, output.tensor, "copy", f"it updates {output.alias}: {reason}", size)
        )
    if not notes:
        return program, ()
    fusion = replace(program.fusion, outputs=tuple(outputs))
    return replace(program, fusion=fusion), tuple(notes)
