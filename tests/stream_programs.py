"""Programs whose loops take turns on worker streams, and data for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshfuse import FusionDefinition
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.host.nodes import HostProgram
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.ir.parser import parse_program
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from sharded_runs import integers


def lowered(fd: FusionDefinition, inputs: Sequence[torch.Tensor], streams: int) -> HostProgram:
    names = [f"number_of_streams({streams})", "check_host_program"]
    options = with_options(NO_OPTIONS, names)
    program = parse_program(repr(fd.fusion))
    host = compile(program, signature_of(inputs), kernels=False, options=options).host
    assert parse_host_program(print_host_program(host)) == host
    return host


def chunks_of(count: int) -> list[torch.Tensor]:
    return [integers(count, 1, 2, 4), integers(4, 5)]
