"""What of a host program a CUDA graph can repeat."""

from __future__ import annotations

from meshfuse.host.nodes import Collective, Communicate, Evaluate, HostProgram, all_nodes
from meshfuse.ir.ops import Literal, Operand
from meshfuse.ir.ops_attention import SdpfaBwd

BETWEEN_PEERS = (Collective.fetch, Collective.deliver)


def reason_against_capture(program: HostProgram) -> str | None:
    """What in a program a graph cannot repeat that nobody gives new numbers, and the way out; None
    where there is nothing."""
    reason = reason_against_graphs(program)
    if reason is not None:
        return reason
    for node in all_nodes(program.body):
        if isinstance(node, Communicate) and node.collective in BETWEEN_PEERS and node.moves:
            return (
                f"{node.collective.value} number {node.number}, for {node.cause}: transfers "
                "between peers count how often their memory was used, which a graph cannot; "
                'capture with overlap="off" or multidevice.Overlap.chunks(n), and without swizzled '
                "loops"
            )
    return None


def reason_against_graphs(program: HostProgram) -> str | None:
    """What in a program no graph can repeat, and the way out; None where there is nothing."""
    if program.random is not None:
        return (
            "it draws random numbers from torch's generator at each call, and a graph would repeat "
            "those of its capture; pass rng_seed and rng_offset to the operations that draw, or "
            "leave them out of the program"
        )
    for node in all_nodes(program.body):
        for expr in node.body if isinstance(node, Evaluate) else ():
            if isinstance(expr, SdpfaBwd) and not _is_zero(expr.dropout_p):
                return (
                    f"the host waits for the values of {expr.seed} and {expr.offset}, which say "
                    f"what dropout left in {expr.out}; make dropout_p the number 0"
                )
    return None


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Literal) and not operand.value
