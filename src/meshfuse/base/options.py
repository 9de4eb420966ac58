"""Options: which features are on or off, and what to print.

Text, as in the environment's variables: names separated by commas, arguments in parentheses, for
example `number_of_streams(2),fuse_matmul`. MESHFUSE_ENABLE, MESHFUSE_DISABLE and MESHFUSE_DUMP are
read, each else under its NVFUSER_ name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.frozen import frozen_dataclass

ENABLE_OPTIONS: Final = tuple(
    """
    check_host_program cutlass_scheduler deterministic_collectives fast_math float32_collectives
    fuse_matmul fuse_multiple_matmuls host_ir_jit host_ir_lowering id_model_extra_validation
    insert_resharding_after io_to_lower_precision kernel_db kernel_debug kernel_lineinfo
    kernel_profile memory_promotion multicast_protocol number_of_streams overlap p2p_protocol
    p2p_transport reuse_zeroed_memory static_fusion_count tma_inner_persistent tma_pointwise
    tma_reduction wait_debugger warn_register_spill ws_normalization
    """.split()
)
"""Names of features that are off by default. Those that mean nothing to a target change nothing.

`check_host_program`: each program that is compiled for a mesh or one device is run on devices
without data first; InvariantError says what is wrong.
`deterministic_collectives`: ranks' floats are added in the order of the mesh, on every backend, so
that equal inputs give equal bits. torch.use_deterministic_algorithms(True) asks for it, too.
`float32_collectives`: ranks' 16-bit floats are added in float32 and rounded once, on every backend.
On CPUs they always are.
`overlap(off)`: what `overlap` is of calls that do not say: auto, off or require.
"""

DISABLE_OPTIONS: Final = tuple(
    """
    compile_to_sass contig_indexing expr_simplify fallback fma graph_replay greedy_scheduler
    grouped_grid_welford_outer_opt index_hoist infer_contiguity kernel_reuse magic_zero
    matmul_expr_eval multidevice nvrtc_caching nvtx parallel_compile predicate_elimination
    python_inline_definitions resize_scheduler reuse_mismatched_type_registers var_name_remapping
    welford_vectorization
    """.split()
)
"""Names of features that are on by default.

`graph_replay`: on GPUs, calls between peers whose tensors lie where earlier ones lay are replayed
as CUDA graphs. Read from the environment, once.
"""

DUMP_OPTIONS: Final = tuple(
    """
    bank_conflict buffer_reuse_verbose ca_map communication compile_params cubin cuda_full
    cuda_kernel cuda_to_file cutlass_compile draw_segmented_fusion dynamic_shared_memory
    expr_simplify expr_sort expr_sort_verbose ftrace fusion_args fusion_ir fusion_ir_concretized
    fusion_ir_graph fusion_ir_math fusion_ir_original fusion_ir_presched fusion_ir_preseg
    global_zeroed_memory host_ir host_ir_jit host_ir_lowering index_type indexing_verbose
    inlining kernel_args kernel_ir launch_param lower_verbose occupancy parallel_dimensions
    perf_debug_verbose predicate_elimination pre_segmenter_logging ptx ptxas_verbose
    python_definition sass sass_to_file scheduler_params scheduler_verbose segmented_fusion
    segmenter_logging sync_map transform_propagator
    """.split()
)
"""Names of what can be printed."""

DEFAULT_NUMBER_OF_STREAMS: Final = 4
OVERLAP_MODES: Final = ("auto", "off", "require")
"""What `overlap` may be, the default first."""
_ENTRY = re.compile(r"\s*(?P<name>\w+)\s*(?:\((?P<arguments>[^()]*)\))?\s*(?:,|$)")


@final
@dataclass(frozen=True, slots=True, order=True)
class Option:
    """A named option with its arguments, as written."""

    name: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({','.join(self.arguments)})" if self.arguments else self.name


@final
@frozen_dataclass
class Options:
    """Sets of options as sorted tuples, one entry a name, so that equal sets are equal values."""

    enable: tuple[Option, ...] = ()
    disable: tuple[Option, ...] = ()
    dump: tuple[Option, ...] = ()

    def is_enabled(self, name: str) -> bool:
        return _find(self.enable, name, ENABLE_OPTIONS) is not None

    def is_disabled(self, name: str) -> bool:
        return _find(self.disable, name, DISABLE_OPTIONS) is not None

    def is_dumped(self, name: str) -> bool:
        return _find(self.dump, name, DUMP_OPTIONS) is not None

    def enable_arguments(self, name: str) -> tuple[str, ...]:
        """The arguments of an enable option; () if it is not enabled."""
        found = _find(self.enable, name, ENABLE_OPTIONS)
        return () if found is None else found.arguments

    @property
    def number_of_streams(self) -> int:
        """Streams besides the caller's."""
        arguments = self.enable_arguments("number_of_streams")
        return int(arguments[0]) if arguments else DEFAULT_NUMBER_OF_STREAMS

    @property
    def overlap(self) -> str:
        """What `overlap` is of calls that do not say: one of OVERLAP_MODES."""
        arguments = self.enable_arguments("overlap")
        return arguments[0] if arguments else OVERLAP_MODES[0]


NO_OPTIONS: Final = Options()


def _find(options: tuple[Option, ...], name: str, known: tuple[str, ...]) -> Option | None:
    if name not in known:
        raise KeyError(f"{name} is no option; there are {', '.join(known)}")
    return next((option for option in options if option.name == name), None)


def options_from_environment(environment: Mapping[str, str]) -> Options:
    """The options that an environment asks for, such as os.environ.

    Raises UserError for an unknown name, text that does not parse, or a bad argument.
    """

    def read(variable: str) -> list[str]:
        text = environment.get(f"MESHFUSE_{variable}", environment.get(f"NVFUSER_{variable}", ""))
        return split_options(text)

    disable = read("DISABLE")
    if environment.get("MESHFUSE_DISABLE_FALLBACK", environment.get("NVFUSER_DISABLE_FALLBACK")):
        disable.append("fallback")
    dump = _merged("dump", (), read("DUMP"), DUMP_OPTIONS)
    return with_options(Options(dump=dump), enable=read("ENABLE"), disable=disable)


def with_options(base: Options, enable: Sequence[str] = (), disable: Sequence[str] = ()) -> Options:
    """`base` with more options, each written `name` or `name(arguments)`; the last of a name holds.

    Raises UserError for an unknown name, text that does not parse, or a bad argument.
    """
    options = replace(
        base,
        enable=_merged("enable", base.enable, enable, ENABLE_OPTIONS),
        disable=_merged("disable", base.disable, disable, DISABLE_OPTIONS),
    )
    _check_number_of_streams(options)
    _check_overlap(options)
    return options


def split_options(text: str) -> list[str]:
    """The entries of a comma-separated list; commas inside parentheses separate arguments."""
    entries: list[str] = []
    position = 0
    while position < len(text.rstrip()):
        found = _ENTRY.match(text, position)
        if found is None:
            raise UserError(
                f"options {text!r}: expected name or name(arguments) at {text[position:]!r}"
            )
        entries.append(found.group().rstrip().removesuffix(",").strip())
        position = found.end()
    return entries


def _merged(
    kind: str, base: tuple[Option, ...], added: Sequence[str], known: tuple[str, ...]
) -> tuple[Option, ...]:
    options = {option.name: option for option in base}
    if not isinstance(added, list | tuple):
        raise UserTypeError(
            f"{kind} options are a list of strings, each name or name(arguments), got {added!r}"
        )
    for text in added:
        option = _parse_option(kind, text)
        if option.name not in known:
            raise UserError(
                f"Unrecognized {kind}_option: {option.name}. There are {', '.join(known)}"
            )
        options[option.name] = option
    return tuple(sorted(options.values()))


def _parse_option(kind: str, text: str) -> Option:
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' values
        raise UserTypeError(f"{kind} option {text!r}: is a string, name or name(arguments)")
    found = _ENTRY.fullmatch(text)
    if found is None:
        raise UserError(f"{kind} option {text!r}: expected name or name(arguments)")
    arguments = found["arguments"]
    if not arguments:
        return Option(found["name"])
    return Option(found["name"], tuple(argument.strip() for argument in arguments.split(",")))


def _check_number_of_streams(options: Options) -> None:
    option = _find(options.enable, "number_of_streams", ENABLE_OPTIONS)
    if option is None:
        return
    if len(option.arguments) != 1 or not option.arguments[0].isdecimal():
        raise UserError(f"enable option {option}: takes one number, as number_of_streams(2)")
    if options.number_of_streams < 1:
        raise UserError(f"enable option {option}: there must be at least one stream")


def _check_overlap(options: Options) -> None:
    option = _find(options.enable, "overlap", ENABLE_OPTIONS)
    if option is None or not option.arguments:
        return
    if len(option.arguments) != 1 or option.arguments[0] not in OVERLAP_MODES:
        raise UserError(f"enable option {option}: takes one of {', '.join(OVERLAP_MODES)}")
