"""Options: parsed from an environment, added to for one call, refused by name."""

import pytest

from meshfuse.base.errors import UserError
from meshfuse.base.options import (
    DISABLE_OPTIONS,
    DUMP_OPTIONS,
    ENABLE_OPTIONS,
    Option,
    Options,
    options_from_environment,
    with_options,
)


def test_nothing_asked_for() -> None:
    options = options_from_environment({"HOME": "/"})
    assert options == Options()
    assert not options.is_enabled("fuse_matmul")
    assert not options.is_disabled("fallback")
    assert not options.is_dumped("host_ir")
    assert options.enable_arguments("kernel_profile") == ()
    assert options.number_of_streams == 4


def test_variables() -> None:
    options = options_from_environment(
        {
            "MESHFUSE_ENABLE": "kernel_profile(x, y),fuse_matmul , number_of_streams(2)",
            "MESHFUSE_DISABLE": "kernel_reuse",
            "MESHFUSE_DUMP": "host_ir,cuda_kernel",
        }
    )
    assert options.enable == (
        Option("fuse_matmul"),
        Option("kernel_profile", ("x", "y")),
        Option("number_of_streams", ("2",)),
    )
    assert options.enable_arguments("kernel_profile") == ("x", "y")
    assert options.number_of_streams == 2
    assert options.is_disabled("kernel_reuse")
    assert options.is_dumped("host_ir")
    assert [str(option) for option in options.enable][1:] == [
        "kernel_profile(x,y)",
        "number_of_streams(2)",
    ]


def test_our_variable_goes_before_the_one_of_nvfuser() -> None:
    environment = {"NVFUSER_ENABLE": "fuse_matmul", "NVFUSER_DUMP": "host_ir"}
    assert options_from_environment(environment).is_enabled("fuse_matmul")
    environment["MESHFUSE_ENABLE"] = ""
    options = options_from_environment(environment)
    assert not options.is_enabled("fuse_matmul")
    assert options.is_dumped("host_ir")


@pytest.mark.parametrize("variable", ["MESHFUSE_DISABLE_FALLBACK", "NVFUSER_DISABLE_FALLBACK"])
def test_the_fallback_has_a_variable_of_its_own(variable: str) -> None:
    assert options_from_environment({variable: "1"}).is_disabled("fallback")


def test_options_of_one_call_leave_the_base_alone() -> None:
    base = with_options(Options(), enable=["fuse_matmul", "number_of_streams(3)"])
    options = with_options(base, enable=["number_of_streams(1)"], disable=["fma"])
    assert options.is_enabled("fuse_matmul")
    assert options.number_of_streams == 1
    assert options.is_disabled("fma")
    assert base.number_of_streams == 3
    assert not base.is_disabled("fma")


def test_order_does_not_matter() -> None:
    one = with_options(Options(), enable=["fuse_matmul", "overlap"])
    two = with_options(with_options(Options(), enable=["overlap"]), enable=["fuse_matmul"])
    assert one == two
    assert hash(one) == hash(two)


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="Unrecognized enable_option: x"):
        with_options(Options(), enable=["x"])
    with pytest.raises(UserError, match="Unrecognized disable_option: fuse_matmul"):
        with_options(Options(), disable=["fuse_matmul"])
    with pytest.raises(UserError, match="Unrecognized dump_option: y"):
        options_from_environment({"NVFUSER_DUMP": "y"})
    with pytest.raises(KeyError, match="z is no option"):
        Options().is_enabled("z")


@pytest.mark.parametrize("text", ["fuse_matmul(", "a b", "(x)", "kernel_profile((x))"])
def test_text_that_does_not_parse(text: str) -> None:
    with pytest.raises(UserError, match=r"expected name or name\(arguments\)"):
        options_from_environment({"MESHFUSE_ENABLE": text})
    with pytest.raises(UserError, match=r"expected name or name\(arguments\)"):
        with_options(Options(), enable=[text])


@pytest.mark.parametrize("arguments", ["", "()", "(0)", "(-1)", "(two)", "(1, 2)"])
def test_a_number_of_streams_is_a_positive_number(arguments: str) -> None:
    with pytest.raises(UserError, match=r"number_of_streams"):
        with_options(Options(), enable=[f"number_of_streams{arguments}"])


def test_tables_are_sorted_and_distinct() -> None:
    for table in (ENABLE_OPTIONS, DISABLE_OPTIONS):
        assert list(table) == sorted(set(table))
    assert len(set(DUMP_OPTIONS)) == len(DUMP_OPTIONS) == 51
